"""Matrix products in a trace: what is multiplied, by shape, and how fast."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from steplab.costs.op_call import OpCall, TensorArg
from steplab.findings.case import Case
from steplab.findings.rows import Mask, Rows

# Position of the first factor among the arguments; the second follows.
FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
# Share of a card's peak that large products reach in practice: 762 of 989 TFLOP/s on an H200.
REACHED = 0.75
LARGE = 0.2  # of the FLOPs of the largest call


class Matmul(NamedTuple):
    """`batch` products of (m, k) by (k, n)."""

    batch: int
    m: int
    k: int
    n: int
    left: TensorArg
    right: TensorArg


def as_matmul(call: OpCall) -> Matmul | None:
    """Return the product that an operator computes; None if it is not a product."""
    first = FACTORS.get(call.name)
    if first is None:
        return None
    left, right = call.tensor(first), call.tensor(first + 1)
    if left is None or right is None or len(left.dims) != len(right.dims):
        return None
    if len(left.dims) not in (2, 3) or left.dims[-1] != right.dims[-2]:
        return None
    batch = left.dims[0] if len(left.dims) == 3 else 1
    return Matmul(batch, left.dims[-2], left.dims[-1], right.dims[-1], left, right)


def matmuls(rows: Rows) -> dict[int, Matmul]:
    """Return the calls that are products, by their number in `Rows.calls`."""
    found = ((number, as_matmul(call)) for number, call in enumerate(rows.calls))
    return {number: one for number, one in found if one is not None}


def flop_rate(rows: Rows, mask: Mask) -> float:
    """Return the FLOP per ms of the rows whose FLOPs are known; 0 where none are."""
    counted = mask & ~np.isnan(rows.work.flops)
    spent = rows.ms(counted)
    return float(rows.work.flops[counted].sum()) / rows.steps / spent if spent else 0.0


def attainable_rate(case: Case, among: Mask, dtype: str = "bf16") -> float:
    """Return the FLOP per ms that the products of this trace could reach.

    The fastest of the large calls in `among` (at least a fifth of the FLOPs of the largest), or
    75 % of the card's peak where the card is known and that is more.
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
