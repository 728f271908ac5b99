"""Verdicts about the work of a trace: what the operators behind it are for, as the Run recorded it.

The operators of the watched step are found again in the trace by name and order. What ran inside
one belongs to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from steplab.core import Dataflow
from steplab.findings.rows import Mask, Rows
from steplab.trace.budget import data_ranges
from steplab.trace.events import Ints, Trace
from steplab.trace.spans import nest
from steplab.trace.windows import step_windows

AHEAD = 400  # operators of the trace among which the next one is looked for
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
    """Return the row in the last step's operators of each watched one, -1: not there."""
    ops, window = trace.ops, step_windows(trace)[-1]
    inside = (ops.start >= window.start) & (ops.start < window.end)
    inside &= data_ranges(trace).within(ops.start, ops.start + 1) == 0
    rows = np.flatnonzero(inside)
    names = ops.name[rows].tolist()
    starts, ends, threads = (c[rows].tolist() for c in (ops.start, ops.end, ops.thread))
    wanted = [_code(trace, name) for name in dataflow.names]
    found = np.full(len(dataflow.ops), -1, np.int64)
    within: dict[int, int] = {}  # by thread, until when the operator lasts that was found last
    place = 0
    for index, number in enumerate(dataflow.ops):
        code = wanted[number]
        for here in range(place, min(place + AHEAD, len(rows))):
            if names[here] == code and starts[here] >= within.get(threads[here], 0):
                found[index] = rows[here]
                within[threads[here]] = ends[here]
                place = here + 1
                break
    return found


def _code(trace: Trace, name: str) -> int:
    return trace.texts.index(name) if name in trace.texts else -2
