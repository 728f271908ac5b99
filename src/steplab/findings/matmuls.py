"""Matrix products in a trace: what is multiplied, by shape, and how fast; loops over experts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steplab.costs.op_call import OpCall, TensorArg
from steplab.findings.case import Case
from steplab.findings.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.events import Ints

# Position of the first factor among the arguments; the second follows.
FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
# Share of a card's peak that large products reach in practice: 762 of 989 TFLOP/s on an H200.
REACHED = 0.75
LARGE = 0.2  # of the FLOPs of the largest call
MIN_PRODUCTS = 8  # of one kind in one loop
# Different sizes: routing makes nearly as many as there are experts, a recurrent layer two.
MIN_SIZES = 4
# One of these gives an expert its tokens; parts of a sequence need none of them.
CHOOSES = frozenset(
    f"aten::{name}"
    for name in "topk sort index index_select gather masked_select nonzero bincount".split()
)
MAX_EXPERTS = 1024
MAX_LOOPS = 300  # a model of 96 layers has 288; each is a mask over all work


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


def quickest(rows: Rows) -> Ints:
    """Return for each row the duration (ns) of the fastest call of its shapes.

    What it takes where it waits for no core: on two busy ones the median product of 512 rows took
    four times as long.
    """
    shortest = np.full(len(rows.calls), np.iinfo(np.int64).max)
    np.minimum.at(shortest, rows.call, rows.work.duration)
    each: Ints = shortest[rows.call]
    return each


def attainable_rate(
    case: Case, among: Mask, dtype: str = "bf16", durations: Ints | None = None
) -> float:
    """Return the FLOP per ms that the products of this trace could reach.

    The fastest of the large calls in `among` (at least a fifth of the FLOPs of the largest), or
    75 % of the card's peak where the card is known and that is more. By the durations of the rows,
    or by others in their place.
    """
    rows = case.rows
    assert rows is not None
    durations = rows.work.duration if durations is None else durations
    counted = among & ~np.isnan(rows.work.flops)
    numbers, size = rows.call[counted], len(rows.calls)
    spent = np.bincount(numbers, durations[counted], size) / 1e6 * rows.scale
    flops = np.bincount(numbers, rows.work.flops[counted], size)
    each = flops / np.maximum(np.bincount(numbers, minlength=size), 1)
    large = (each >= LARGE * each.max(initial=0.0)) & (spent > 0)
    seen = float((flops[large] / spent[large]).max()) if large.any() else 0.0
    peak = case.card.peak(dtype) if case.card else None
    return max(seen, REACHED * peak * 1e9 if peak else 0.0)


# Mixtures of experts.


@dataclass(frozen=True)
class Routing:
    """Each of `tokens` rows goes to `k` of `experts` experts."""

    tokens: int
    experts: int
    k: int

    @property
    def assignments(self) -> int:
        """Rows that all experts together compute."""
        return self.tokens * self.k


@dataclass(frozen=True)
class ExpertLoop:
    """A part of the model that multiplies the rows of each expert by themselves."""

    name: str  # "blocks.0.experts.*.up", or a line of code
    products: Mask  # all its products, backward included
    whole: Mask  # the same with gathering, activation and scattering around them
    sizes: tuple[int, ...]  # rows of each forward product
    k: int
    n: int


def routing(rows: Rows) -> Routing | None:
    """Return the largest routing by `topk` over at most MAX_EXPERTS columns; None: no routing."""
    found = []
    for call in rows.calls:
        scores, k = call.tensor(0), call.integer(1)
        if call.name == "aten::topk" and scores and k and len(scores.dims) > 1:
            experts = scores.dims[-1]
            if k < experts <= MAX_EXPERTS:
                found.append(Routing(scores.numel // experts, experts, k))
    return max(found, key=lambda one: one.assignments, default=None)


def expert_loops(rows: Rows) -> list[ExpertLoop]:
    """Return the loops with many forward products of one kind, each on tokens chosen for it."""
    known = matmuls(rows)
    is_product = np.flatnonzero(np.isin(rows.call, list(known)) & rows.inside)
    where = _loop_names(rows, is_product)
    in_forward = rows.labeled("phase", lambda label: label != "backward")
    if not (in_forward & rows.called(lambda call: call.name in CHOOSES)).any():
        return []
    forward = in_forward[is_product]
    kinds: dict[tuple[str, int, int], list[int]] = {}
    tokens = 0
    for row, name in zip(is_product[forward], where[forward], strict=True):
        one = known[int(rows.call[row])]
        tokens = max(tokens, one.m)
        if one.batch == 1 and name != UNATTRIBUTED:
            kinds.setdefault((name, one.k, one.n), []).append(one.m)
    found: list[ExpertLoop] = []
    for (name, k, n), sizes in kinds.items():
        scarce = np.mean(sizes) <= tokens / 2 and len(set(sizes)) >= MIN_SIZES
        if scarce and len(sizes) >= MIN_PRODUCTS * rows.steps and len(found) < MAX_LOOPS:
            mask = np.zeros(len(rows.work), dtype=bool)
            mask[is_product[where == name]] = True
            whole = mask | _around(rows, mask, name)
            found.append(ExpertLoop(name, mask, whole, tuple(sizes), k, n))
    return found


def expert_capacities(rows: Rows, routed: Routing) -> dict[int, int]:
    """Return the rows per expert of batched products over the experts, by number of call."""
    forward = rows.labeled("phase", lambda label: label == "forward")
    numbers = set(np.unique(rows.call[forward]).tolist())
    return {
        number: one.m
        for number, one in matmuls(rows).items()
        # An expert gets at most all tokens; a larger size is some other dimension.
        if number in numbers and one.batch == routed.experts and one.m <= routed.tokens
    }


def _around(rows: Rows, multiplied: Mask, name: str) -> Mask:
    """Return all rows of the module that loops over the experts, or of the function."""
    modules = {rows.work.labels[code] for code in np.unique(rows.work.module[multiplied])}
    if UNATTRIBUTED in modules:
        functions = np.unique(rows.work.function[multiplied])
        return rows.inside & np.isin(rows.work.function, functions)
    if multiplied.sum() >= MIN_PRODUCTS * len(modules) * rows.steps:
        return rows.labeled("module", lambda label: label in modules)
    # Every expert is a module in a list. A list is never called: then its owner has the loop.
    head = name.rpartition(".*")[0]
    owner = head if rows.labeled("module", lambda label: label == head).any() else _parent(head)
    return rows.labeled("module", lambda label: label == owner or label.startswith(f"{head}."))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _starred(label: str) -> str:
    """Return the label with its last number replaced by a star."""
    return re.sub(r"^(\D*)\d+", r"\1*", label[::-1])[::-1]  # from the end: one pass


def _loop_names(rows: Rows, chosen: Ints) -> NDArray[np.object_]:
    """Return the starred module of each chosen row, or its line where no module is known."""
    labels = np.array(rows.work.labels, dtype=object)
    starred = np.array([_starred(label) for label in labels], dtype=object)
    modules, lines = rows.work.module[chosen], rows.work.line[chosen]
    names: NDArray[np.object_] = np.where(modules > 0, starred[modules], labels[lines])
    return names
