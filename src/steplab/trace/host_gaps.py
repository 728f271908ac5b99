"""Without a device: what the host takes before each operator, in Python, dispatch and autograd.

Operators of one thread follow one another, and what lies between two of them leads to the second:
a line of Python, views, the framework's way to it, a node of autograd that gets ready. If an
operator goes, that goes too. What the host did for long before an operator is a silence and is left
out, as are batches that it fetched and ranks that it waited for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steplab.trace.analysis import Silences, Syncs, Window, WorkTable
from steplab.trace.budget import data_ranges, host_communication
from steplab.trace.events import Ints, Trace
from steplab.trace.phases import AUTOGRAD_NODE
from steplab.trace.silences import computes
from steplab.trace.spans import nest, union
from steplab.trace.windows import STEP_RANGE, step_at

# A node calls operators and does nothing itself; of compiled code it runs what has no operators.
_NODE = re.compile(rf"{AUTOGRAD_NODE}.*|(?!Compiled)\w+Backward\d*|{re.escape(STEP_RANGE)}.*")


def time_with_gaps(
    trace: Trace, windows: Sequence[Window], work: WorkTable, syncs: Syncs, silences: Silences
) -> Ints:
    """Return for every operator its ns with its part of the gap before it; `work` is of `trace`.

    The gap belongs to the outermost operator behind it and is shared out by time to what runs in
    that. Views and nodes of autograd have 0: they are parts of gaps.
    """
    ops = trace.ops
    working = trace.named(ops, _works)
    found = np.where(working, work.duration, 0)
    if not working.any() or not windows:
        return found
    nesting = nest(ops, working)
    outermost = _main_thread(trace, working) & (nesting.parents() < 0)
    gap = np.zeros(len(ops), np.int64)
    gap[outermost] = _gaps_before(trace, windows, outermost, syncs, silences)
    root = nest(ops, outermost).innermost(ops.thread, ops.start)
    inside = working & (root >= 0)
    spent = np.bincount(root[inside], work.duration[inside], len(ops))
    known = inside & (spent[root] > 0)
    share = work.duration[known] / spent[root[known]]
    found[known] += (gap[root[known]] * share).astype(np.int64)
    return found


def _works(name: str) -> bool:
    """Whether an operator does something itself; of compiled code a node runs what has none."""
    return _NODE.fullmatch(name) is None and (computes(name) or not name.startswith("aten::"))


def _main_thread(trace: Trace, working: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each operator runs in the thread that runs most: others may wait between theirs."""
    threads, counts = np.unique(trace.ops.thread[working], return_counts=True)
    return working & (trace.ops.thread == threads[counts.argmax()])


def _gaps_before(
    trace: Trace,
    windows: Sequence[Window],
    outermost: NDArray[np.bool_],
    syncs: Syncs,
    silences: Silences,
) -> Ints:
    """Return the ns between each outermost operator and the one before it in its step."""
    start, end = trace.ops.start[outermost], trace.ops.end[outermost]
    order = np.argsort(start, kind="stable")
    reached = np.concatenate(([0], np.maximum.accumulate(end[order])[:-1]))
    begun = step_at(windows, start[order])
    first = {window.number: window.start for window in windows}
    border = np.array([first.get(number, -1) for number in begun.tolist()])
    low = np.where(border >= 0, np.maximum(reached, border), start[order])
    low = np.minimum(low, start[order])
    told = union(silences.start, silences.end) | union(syncs.start, syncs.start + syncs.duration)
    told |= data_ranges(trace) | host_communication(trace)
    gaps = np.zeros(len(start), np.int64)
    gaps[order] = start[order] - low - told.within(low, start[order])
    return gaps
