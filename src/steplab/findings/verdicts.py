"""Verdicts about the work of a trace: what the operators behind it are for, as the Run recorded it.

The operators of the watched step are found again in the trace by name and order. What ran inside
one belongs to it.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from steplab.core import Dataflow
from steplab.findings.rows import Mask, Rows
from steplab.trace.budget import data_ranges
from steplab.trace.events import Ints, Trace
from steplab.trace.spans import nest
from steplab.trace.windows import step_windows

AHEAD = 3  # operators that follow one, and must not lie before it
FOUND = 0.9  # of the watched operators; with fewer, the trace shows another step


def work_with(rows: Rows, dataflow: Dataflow, verdicts: str) -> Mask:
    """Return the rows of work inside operators with one of these verdicts; none if unsure."""
    trace = rows.source
    found = _found(trace, dataflow)
    mask: Mask = np.zeros(len(rows.work), np.bool_)
    if (found >= 0).mean() < FOUND:
        return mask
    letters: NDArray[np.str_] = np.array(list(dataflow.verdicts))
    chosen = np.zeros(len(trace.ops), np.bool_)
    chosen[found[found >= 0]] = True
    wanted = np.zeros(len(trace.ops), np.bool_)
    wanted[found[np.isin(letters, list(verdicts)) & (found >= 0)]] = True
    has_op = (rows.work.op_row >= 0) & rows.inside
    op = rows.work.op_row[has_op]
    around = nest(trace.ops, chosen).innermost(trace.ops.thread[op], trace.ops.start[op])
    mask[has_op] = (around >= 0) & wanted[around]
    return mask


def _found(trace: Trace, dataflow: Dataflow) -> Ints:
    """Return the row in the last step's operators of each watched one, -1: not there.

    Both steps run the same operators in the same order, but for a few: under watch, autograd adds
    gradients up anew instead of in place. One that is missing must not be taken for a far later one
    of its name, which lies behind those that follow.
    """
    ops, window = trace.ops, step_windows(trace)[-1]
    inside = (ops.start >= window.start) & (ops.start < window.end)
    inside &= data_ranges(trace).within(ops.start, ops.start + 1) == 0
    rows = np.flatnonzero(inside)
    places = _Places(trace, rows)
    found = np.full(len(dataflow.ops), -1, np.int64)
    names = [places.of(name) for name in dataflow.names]
    for index, number in enumerate(dataflow.ops):
        here = places.following(names[number])
        after = [places.following(names[n]) for n in dataflow.ops[index + 1 : index + 1 + AHEAD]]
        if here < len(rows) and not (after and here > max(after)):
            found[index] = rows[here]
            places.take(here)
    return found


class _Places:
    """Where operators of each name stand, from the last one that was found on."""

    def __init__(self, trace: Trace, rows: Ints) -> None:
        ops = trace.ops
        self._codes = {text: code for code, text in enumerate(trace.texts)}
        self._names = ops.name[rows]
        self._start, self._end = ops.start[rows].tolist(), ops.end[rows].tolist()
        self._thread = ops.thread[rows].tolist()
        self._until: dict[int, int] = {}  # by thread: what begins before is inside the last one
        self._place = 0

    def of(self, name: str) -> list[int]:
        """Return all places of a name, in order."""
        return np.flatnonzero(self._names == self._codes.get(name, -2)).tolist()

    def following(self, places: list[int]) -> int:
        """Return the first of the places that is ahead; the number of all if there is none."""
        for place in places[bisect_left(places, self._place) :]:
            if self._start[place] >= self._until.get(self._thread[place], 0):
                return place
        return len(self._start)

    def take(self, place: int) -> None:
        """Go on behind this operator and all that is inside it."""
        self._place = place + 1
        self._until[self._thread[place]] = self._end[place]
