"""Syncs: calls in which the host waited for the device."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steplab.trace.analysis import Syncs, Window
from steplab.trace.attribution import Attribution, named_so
from steplab.trace.events import COPY, Ints, Trace
from steplab.trace.labels import Labels
from steplab.trace.launches import launches_of
from steplab.trace.nesting import nest
from steplab.trace.phases import PACE
from steplab.trace.windows import step_at

# Copies without "Async" return when the copy is done; freeing waits for what still runs.
_WAITS = re.compile(
    r"(cuda|hip)(Stream|Device|Event)Synchronize(_v\w+)?|(cuda|hip)Memcpy(2D|3D|WithStream)?"
    r"|cu(Stream|Event|Ctx)Synchronize|cuMemcpy(HtoD|DtoH|DtoD)_v2|(cuda|hip)Free"
)


def syncs_of(
    trace: Trace, windows: Sequence[Window], attribution: Attribution, labels: Labels
) -> Syncs:
    """Return the waiting calls of a trace, sorted by start, with operator and line.

    An asynchronous copy waits too where its host memory is pageable and the call returned only
    after the copy had ended. The recorder's own waits, which keep the host one step ahead, are
    left out.
    """
    calls = trace.calls
    waits = named_so(trace, calls, lambda name: _WAITS.fullmatch(name) is not None)
    rows = np.flatnonzero((waits | _blocking_copies(trace)) & ~_pacing(trace))
    start, end = calls.start[rows], calls.end[rows]
    places = attribution.at(calls.thread[rows].astype(np.int64), start)
    return Syncs(
        start=start,
        duration=calls.duration[rows],
        call=labels.translated(trace, calls.name[rows]),
        op=places.op,
        line=places.line,
        step=step_at(windows, start),
        idle=_idle_after(trace, start, end),
    )


def _pacing(trace: Trace) -> NDArray[np.bool_]:
    ours = nest(trace.ranges, named_so(trace, trace.ranges, PACE.__eq__))
    calls = trace.calls
    return ours.innermost(calls.thread.astype(np.int64), calls.start) >= 0


def _blocking_copies(trace: Trace) -> NDArray[np.bool_]:
    blocking = np.zeros(len(trace.calls), np.bool_)
    pageable = named_so(trace, trace.device, lambda name: "Pageable" in name)
    copies = np.flatnonzero(pageable & (trace.device.kind == COPY))
    launches = launches_of(trace)
    copies = copies[launches.call[copies] >= 0]
    waited = trace.device.end[copies] <= launches.returned[copies]
    blocking[launches.call[copies[waited]]] = True
    return blocking


def _idle_after(trace: Trace, start: Ints, end: Ints) -> Ints:
    """ns for which the device had nothing to do because the host had waited.

    Without the waits before a launch it would have come earlier by their duration at most, and
    the device would have begun earlier by its idle time at most: the smaller of the two counts,
    and is split by duration. 0 where the device was busy when the host came back, and where its
    next work had been launched before.
    """
    device = trace.device
    if not len(device) or not len(start):
        return np.zeros(len(start), np.int64)
    following = np.searchsorted(device.start, end, side="left")
    busy_until = np.concatenate(([0], np.maximum.accumulate(device.end)))[following]
    next_called = np.append(launches_of(trace).called, -1)[following]
    before_launch = (next_called < 0) | (start < next_called)
    dry = np.flatnonzero((busy_until <= end) & before_launch)
    _, first, gap = np.unique(following[dry], return_index=True, return_inverse=True)
    since = np.maximum(busy_until[dry], start[dry])[first]
    until = np.append(device.start, trace.end)[following[dry]][first]
    waited = np.bincount(gap, (end - start)[dry])
    part = np.minimum(until - since, waited) / np.maximum(waited, 1)
    idle = np.zeros(len(start), np.int64)
    idle[dry] = ((end - start)[dry] * np.maximum(part, 0)[gap]).astype(np.int64)
    return idle
