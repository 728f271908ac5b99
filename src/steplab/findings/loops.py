"""Loops in Python: one line of one module that calls the same operator over and over in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steplab.findings.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED

# Layers of a model are modules of their own; gradient accumulation rarely exceeds this.
MIN_TURNS = 24


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
