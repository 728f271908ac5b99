"""Where a step runs `copy.deepcopy` over many tensors, by the storages that it hands out."""

from __future__ import annotations

import numpy as np

from steplab.findings.rows import Mask, Rows
from steplab.trace.events import Ints, Trace

MIN_TENSORS = 24
PAUSE = 1_000_000  # ns between two tensors of one copy: a large one takes that
HANDS_OUT = "aten::set_"
PER_TENSOR = 2  # of it: the new storage gets a tensor of bytes, and the new tensor its storage


def stretches_of_copying(trace: Trace) -> tuple[Ints, Ints]:
    """Return where in time (ns) many tensors in a row get a storage: begin and end of each."""
    rows = np.flatnonzero(trace.named(trace.ops, HANDS_OUT.__eq__))
    start = np.sort(trace.ops.start[rows])
    if not len(start):
        return start, start
    cut = np.flatnonzero(np.diff(start) > PAUSE) + 1
    first, last = np.append(0, cut), np.append(cut, len(start)) - 1
    many = last - first + 1 >= PER_TENSOR * MIN_TENSORS
    return start[first[many]], start[last[many]]


def deep_copied(rows: Rows) -> Mask:
    """Return the work that operators in those stretches launched."""
    begin, end = stretches_of_copying(rows.source)
    mask: Mask = np.zeros(len(rows.work), dtype=bool)
    if not len(begin):
        return mask
    has_op = (rows.work.op_row >= 0) & rows.inside
    at = rows.source.ops.start[rows.work.op_row[has_op]]
    place = np.searchsorted(begin, at, "right") - 1
    mask[has_op] = (place >= 0) & (at <= end[np.maximum(place, 0)])
    return mask
