"""Launches: the host call behind every kernel, copy and fill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steplab.trace.events import Ints, Trace


@dataclass(frozen=True)
class Launches:
    """One row per device activity: where and when the host asked for it."""

    call: Ints  # row in Trace.calls, -1: not in the trace
    thread: Ints  # of the call, -1: unknown
    called: Ints  # ns, -1: unknown
    returned: Ints  # ns, -1: unknown


def launches_of(trace: Trace) -> Launches:
    """Join device activities with host calls by correlation.

    All kernels of a replayed CUDA graph have the correlation of the one call that launched it.
    """
    calls = trace.calls
    row = _rows_by_key(calls.correlation, trace.device.correlation)
    if not len(calls):
        return Launches(row, row, row, row)
    known = row >= 0
    thread = np.where(known, calls.thread[row], -1).astype(np.int64)
    called = np.where(known, calls.start[row], -1)
    return Launches(row, thread, called, np.where(known, calls.end[row], -1))


def _rows_by_key(keys: Ints, wanted: Ints) -> Ints:
    """Row of the first of `keys` that equals each of `wanted`; -1: none, or not a positive key."""
    rows = np.flatnonzero(keys > 0)
    rows = rows[np.argsort(keys[rows], kind="stable")]
    if not len(rows):
        return np.full(len(wanted), -1, np.int64)
    place = np.searchsorted(keys[rows], wanted)
    found = rows[np.minimum(place, len(rows) - 1)]
    return np.where((wanted > 0) & (keys[found] == wanted), found, -1)
