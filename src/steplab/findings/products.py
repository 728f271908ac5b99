"""Matrix products by their shapes: who multiplies what, and how fast."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from steplab.costs.op_call import OpCall, TensorArg
from steplab.findings.case import Case
from steplab.findings.rows import Mask, Rows

# Where the two factors stand among the arguments.
FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
# The share of a card's peak that large products reach in practice: 762 of 989 on an H200.
REACHED = 0.75
LARGE = 0.2  # of the FLOPs of the largest call


class Product(NamedTuple):
    """`batch` products of (m, k) by (k, n)."""

    batch: int
    m: int
    k: int
    n: int
    left: TensorArg
    right: TensorArg


def product(call: OpCall) -> Product | None:
    """Return the product that an operator computes, or None when it is no product."""
    first = FACTORS.get(call.name)
    if first is None:
        return None
    left, right = call.tensor(first), call.tensor(first + 1)
    if left is None or right is None or len(left.dims) != len(right.dims):
        return None
    if len(left.dims) not in (2, 3) or left.dims[-1] != right.dims[-2]:
        return None
    batch = left.dims[0] if len(left.dims) == 3 else 1
    return Product(batch, left.dims[-2], left.dims[-1], right.dims[-1], left, right)


def products(rows: Rows) -> dict[int, Product]:
    """Return the product behind the number of each call that is one."""
    found = ((number, product(call)) for number, call in enumerate(rows.calls))
    return {number: one for number, one in found if one is not None}


def numbered(rows: Rows, numbers: set[int]) -> Mask:
    """Rows inside a step whose call has one of these numbers."""
    mask: Mask = np.isin(rows.call, list(numbers)) & rows.inside
    return mask


def rate(rows: Rows, mask: Mask) -> float:
    """FLOP per ms of the rows whose FLOPs are known; 0 where none are."""
    counted = mask & ~np.isnan(rows.work.flops)
    spent = rows.ms(counted)
    return float(rows.work.flops[counted].sum()) / rows.steps / spent if spent else 0.0


def best_rate(case: Case, among: Mask, dtype: str = "bf16") -> float:
    """FLOP per ms that the products of this trace could reach.

    The quickest of the large calls in `among` (a fifth of the largest one's FLOPs), or 75 % of
    the card's peak where the card is known.
    """
    rows = case.rows
    assert rows is not None
    counted = among & ~np.isnan(rows.work.flops)
    numbers, size = rows.call[counted], len(rows.calls)
    spent = np.bincount(numbers, rows.work.duration[counted], size) / 1e6 * rows.scale
    flops = np.bincount(numbers, rows.work.flops[counted], size)
    each = flops / np.maximum(np.bincount(numbers, minlength=size), 1)
    large = (each >= LARGE * each.max(initial=0.0)) & (spent > 0)
    seen = float((flops[large] / spent[large]).max()) if large.any() else 0.0
    peak = case.card.peak(dtype) if case.card else None
    return max(seen, REACHED * peak * 1e9 if peak else 0.0)
