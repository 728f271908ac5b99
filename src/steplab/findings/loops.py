"""Loops in Python: one line of one module that calls the same operator over and over in a step."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from steplab.core.units import fold_layer_numbers
from steplab.findings.matmuls import matmuls
from steplab.findings.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED

# Layers of a model are modules of their own; gradient accumulation rarely exceeds this.
MIN_TURNS = 24
NARROW = 128  # columns of a product that a tile of the device could have twice over
MIN_MEMBERS = 8  # of a list
_IN_LISTS = re.compile(r"(.*\.\d+\..*)\.(\d+)(?:\..*)?")  # a list inside a list


@dataclass(frozen=True)
class PythonLoop:
    """What a loop runs in the forward pass."""

    line: str
    op: str  # the operator that it calls most
    turns: int  # calls of it in one step
    whole: Mask  # what the function around it calls as often, backward included


def python_loops(rows: Rows) -> list[PythonLoop]:
    """Return the line that a loop calls most from, one of each function, most calls first."""
    work = rows.work
    forward = rows.labeled("phase", lambda label: label not in ("backward", "optimizer", "clip"))
    # All kernels of a replayed graph have one launch: they are no turns.
    replayed = np.diff(work.launched, prepend=-1) == 0
    chosen = np.flatnonzero(forward & (work.line > 0) & ~(replayed & (work.launched >= 0)))
    if not len(chosen):
        return []
    # By name: a loop over weights calls one operator with many shapes.
    key = np.stack([work.function, work.line, work.module, work.op], axis=0)
    key = key[:, chosen].astype(np.int64)
    distinct, counts = np.unique(key, axis=1, return_counts=True)
    found: dict[int, PythonLoop] = {}
    for column in np.argsort(-counts, kind="stable").tolist():
        turns = int(counts[column]) // rows.steps
        function, line, _, op = distinct[:, column].tolist()
        name = work.labels[op]
        if turns < MIN_TURNS or len(found) >= 3:
            break
        if function not in found and UNATTRIBUTED not in (name, work.labels[line]):
            whole = _turning(rows, rows.inside & (work.function == function))
            found[function] = PythonLoop(work.labels[line], name, turns, whole)
    return list(found.values())


def _turning(rows: Rows, mask: Mask) -> Mask:
    """Return the rows of lines that come at least MIN_TURNS times in a step."""
    counts = np.bincount(rows.work.line[mask], minlength=len(rows.work.labels))
    return mask & (counts >= MIN_TURNS * rows.steps)[rows.work.line]


@dataclass(frozen=True)
class NarrowModules:
    """Modules of a list inside a list, each with products to few columns."""

    name: str  # "layers.*.heads.*"
    members: int  # of one list
    inputs: int
    width: int
    whole: Mask


def narrow_modules(rows: Rows) -> NarrowModules | None:
    """Return the lists of modules with narrow products that take the most time; None: none."""
    labels = rows.work.labels
    known = {n: one for n, one in matmuls(rows).items() if one.n <= NARROW and one.k >= 4 * one.n}
    products = rows.of_calls(known) & rows.labeled("phase", lambda label: label != "backward")
    members: dict[str, dict[str, set[str]]] = {}  # by folded name: list -> its numbers
    for code in np.unique(rows.work.module[products]).tolist():
        found = _IN_LISTS.fullmatch(labels[code])
        if found is not None:
            lists = members.setdefault(fold_layer_numbers(f"{found[1]}.0"), {})
            lists.setdefault(found[1], set()).add(found[2])
    large = {name: of for name, of in members.items() if max(map(len, of.values())) >= MIN_MEMBERS}
    if not large:
        return None
    masks = {name: _in_lists(rows, of) for name, of in large.items()}
    name = max(masks, key=lambda one: rows.ms(masks[one]))
    one = known[int(rows.call[products & masks[name]][0])]
    count = max(map(len, large[name].values()))
    return NarrowModules(name, count, one.k, one.n, masks[name])


def _in_lists(rows: Rows, lists: Iterable[str]) -> Mask:
    """Return the work of all modules in these lists."""
    heads = tuple(f"{path}." for path in lists)
    return rows.labeled("module", lambda label: label.startswith(heads))
