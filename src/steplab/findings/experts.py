"""Mixtures of experts: routing and products of single experts in a trace, and reported loads."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.findings.case import Case
from steplab.findings.matmuls import matmuls
from steplab.findings.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.events import Ints

MIN_PRODUCTS = 8  # of one kind in one loop
# Different sizes: routing makes nearly as many as there are experts, a recurrent layer two.
MIN_SIZES = 4
MAX_EXPERTS = 1024


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
    """Return the loops with many forward products of one kind, each on a part of the tokens."""
    known = matmuls(rows)
    is_product = np.flatnonzero(np.isin(rows.call, list(known)) & rows.inside)
    where = _loop_names(rows, is_product)
    forward = rows.labeled("phase", lambda label: label != "backward")[is_product]
    kinds: dict[tuple[str, int, int], list[int]] = {}
    tokens = 0
    for row, name in zip(is_product[forward], where[forward], strict=True):
        one = known[int(rows.call[row])]
        tokens = max(tokens, one.m)
        if one.batch == 1 and name != UNATTRIBUTED:
            kinds.setdefault((name, one.k, one.n), []).append(one.m)
    found = []
    for (name, k, n), sizes in kinds.items():
        scarce = np.mean(sizes) <= tokens / 2 and len(set(sizes)) >= MIN_SIZES
        if scarce and len(sizes) >= MIN_PRODUCTS * rows.steps:
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
    """Return all rows of the module that loops over the experts, or of the line."""
    modules = {rows.work.labels[code] for code in np.unique(rows.work.module[multiplied])}
    if UNATTRIBUTED in modules:
        return rows.labeled("line", lambda label: label == name)
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
    return re.sub(r"\d+(?!.*\d)", "*", label)


def _loop_names(rows: Rows, chosen: Ints) -> NDArray[np.object_]:
    """Return the starred module of each chosen row, or its line where no module is known."""
    labels = np.array(rows.work.labels, dtype=object)
    starred = np.array([_starred(label) for label in labels], dtype=object)
    modules, lines = rows.work.module[chosen], rows.work.line[chosen]
    names: NDArray[np.object_] = np.where(modules > 0, starred[modules], labels[lines])
    return names


def reported_loads(case: Case) -> tuple[tuple[float, ...], ...]:
    """Return (layers, experts), as the step reported it: each expert's share of the assignments.

    Known whatever kernel ran, with or without a trace.
    """
    reported = case.run.metrics.get("load_LE") if case.run else None
    rows = reported if isinstance(reported, tuple) else ()
    return tuple(row for row in rows if isinstance(row, tuple) and sum(row) > 0)


def dropped_share(case: Case) -> float | None:
    """Return the share of the assignments that were dropped; None if the step reported none."""
    reported = case.run.metrics.get("dropped") if case.run else None
    return reported if isinstance(reported, float) else None
