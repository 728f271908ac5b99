"""Verdicts about the work of a trace: what the operators behind it are for, as the Run recorded it.

The operators of the watched step are found again in the trace by name and order: a longest common
subsequence of both. What ran inside one belongs to it; compiled graphs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from steplab.core import Dataflow
from steplab.findings.rows import Rows
from steplab.trace.budget import data_ranges
from steplab.trace.compiled import COMPILED
from steplab.trace.events import Ints, Trace
from steplab.trace.spans import nest
from steplab.trace.windows import step_windows

BLOCK = 4096  # operators that are looked for at a time
FOUND = 0.9  # of the watched operators; with fewer, the trace shows another step


def letters_of_work(rows: Rows, dataflow: Dataflow) -> NDArray[np.str_]:
    """Return the verdict of the operator around each row of work; "" where unsure."""
    trace = rows.source
    found = _found(trace, dataflow)
    result = np.zeros(len(rows.work), "<U1")
    if (found >= 0).mean() < FOUND:
        return result
    letters = np.zeros(len(trace.ops), "<U1")
    there = found >= 0
    letters[found[there]] = np.array(list(dataflow.verdicts))[there]
    has_op = (rows.work.op_row >= 0) & rows.inside
    op = rows.work.op_row[has_op]
    around = nest(trace.ops, letters != "").innermost(trace.ops.thread[op], trace.ops.start[op])
    result[has_op] = np.where(around >= 0, letters[around], "")
    return result


def _found(trace: Trace, dataflow: Dataflow) -> Ints:
    """Return the row in the last step's operators of each watched one, -1: not there.

    Both steps run the same operators in the same order, but for some: under watch, autograd adds
    up anew instead of in place, and copies what it may not write over.
    """
    ops, window = trace.ops, step_windows(trace)[-1]
    plain = [_plain(name) for name in dataflow.names]
    inside = (ops.start >= window.start) & (ops.start < window.end)
    inside &= data_ranges(trace).within(ops.start, ops.start + 1) == 0
    inside &= trace.named(ops, lambda name: _plain(name) in plain)
    graphs = nest(ops, trace.named(ops, lambda name: name.startswith(COMPILED)))
    inside &= graphs.innermost(ops.thread, ops.start) < 0
    # What runs inside an operator, the watcher does not see.
    rows = np.flatnonzero(inside & (nest(ops, inside).parents() < 0))
    there = [_plain(trace.text(code)) for code in ops.name[rows].tolist()]
    found = np.full(len(dataflow.ops), -1, np.int64)
    for watched, place in aligned([plain[number] for number in dataflow.ops], there):
        found[watched] = rows[place]
    return found


def _plain(name: str) -> str:
    """Return the name without the mark of an operator in place."""
    return name.removesuffix("_")


def aligned(left: Sequence[str], right: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the places of a longest common subsequence, as far as one within blocks is one."""
    begin, there = 0, 0
    while begin < len(left) and there < len(right):
        block = left[begin : begin + 2 * BLOCK]
        last, after = begin + BLOCK >= len(left), there
        for one, other in _common(block, right[there : there + 3 * BLOCK]):
            if last or one < BLOCK:
                yield begin + one, there + other
                after = there + other + 1
        begin, there = (len(left) if last else begin + BLOCK), after


def _common(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of a longest common subsequence, in order.

    A row of the table of lengths is one integer, whose zeros are where the length grows: rows are
    computed from each other by an addition (Crochemore and others, 2001), a thousand bits at once.
    """
    every = (1 << len(right)) - 1
    where: dict[str, int] = {}
    for place, name in enumerate(right):
        where[name] = where.get(name, 0) | 1 << place
    rows = [every]
    for name in left:
        row, met = rows[-1], rows[-1] & where.get(name, 0)
        rows.append(((row + met) | (row - met)) & every)
    pairs = []
    one, other = len(left), len(right)
    while one and other:
        bit = 1 << (other - 1)
        if rows[one] & bit:
            other -= 1
        elif not rows[one - 1] & bit:
            one -= 1
        else:
            one, other = one - 1, other - 1
            pairs.append((one, other))
    return pairs[::-1]
