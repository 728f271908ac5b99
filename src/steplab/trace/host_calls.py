"""Calls of the CUDA runtime by the host: those that launched device work, and those that waited."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.trace.analysis import Labels, Syncs, Window
from steplab.trace.attribution import Attribution
from steplab.trace.events import COPY, Ints, Trace, at_rows
from steplab.trace.phases import PACING_RANGE
from steplab.trace.spans import nest
from steplab.trace.windows import step_at

# Copies without "Async" return when the copy is done; freeing waits for what still runs.
_WAITS = re.compile(
    r"(cuda|hip)(Stream|Device|Event)Synchronize(_v\w+)?|(cuda|hip)Memcpy(2D|3D|WithStream)?"
    r"|hipMemcpy(HtoD|DtoH|DtoD)|cu(Stream|Event|Ctx)Synchronize|cuMemcpy(HtoD|DtoH|DtoD)_v2|(cuda|hip)Free(Host)?|hipHostFree"
)

_DRIVER_MEMORY = re.compile(
    r"(cuda|hip)(Malloc|Free|HostAlloc|MallocHost|FreeHost|HostFree|HostRegister|HostUnregister)"
    r"|hipHostMalloc|cuMem(Create|Release|Map|Unmap|SetAccess|AddressReserve|AddressFree)"
)


def takes_driver_memory(call: str) -> bool:
    """Whether a call takes memory from the driver or gives it back; torch keeps what it has."""
    return _DRIVER_MEMORY.fullmatch(call) is not None


@dataclass(frozen=True)
class Launches:
    """One row per kernel, copy or fill: where and when the host launched it."""

    call: Ints  # row in Trace.calls, -1: not in the trace
    thread: Ints  # of the call, -1: unknown
    called: Ints  # ns, -1: unknown
    returned: Ints  # ns, -1: unknown


def find_launches(trace: Trace) -> Launches:
    """Join device work with host calls by correlation id.

    All kernels of a replayed CUDA graph have the correlation of the one call that launched it.
    Where several calls have one correlation, none of them is known to be the launch.
    """
    calls = trace.calls
    row, _ = _rows_by_key(calls.correlation, trace.device.correlation)
    thread, called, returned = (
        at_rows(column, row) for column in (calls.thread, calls.start, calls.end)
    )
    return Launches(row, thread, called, returned)


def unclear_launches(trace: Trace) -> tuple[str, ...]:
    """Return a remark about work whose correlation is that of several calls, if there is any."""
    _, several = _rows_by_key(trace.calls.correlation, trace.device.correlation)
    if not several.any():
        return ()
    count = int(several.sum())
    return (f"launch unknown: {count:,} pieces of work with the correlation id of several calls",)


def _rows_by_key(keys: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the row of the only key that equals each of `wanted`, -1: none, and where several do.

    0 never matches.
    """
    rows = np.flatnonzero(keys > 0)
    rows = rows[np.argsort(keys[rows], kind="stable")]
    ordered = keys[rows]
    first, last = (np.searchsorted(ordered, wanted, side) for side in ("left", "right"))
    count = np.where(wanted > 0, last - first, 0)
    found = np.full(len(wanted), -1, np.int64)
    found[count == 1] = rows[first[count == 1]]
    return found, count > 1


def find_syncs(
    trace: Trace, windows: Sequence[Window], attribution: Attribution, labels: Labels
) -> Syncs:
    """Return the calls in which the host waited for the device, with operator and line.

    An asynchronous copy waits too if its host memory is pageable and the call returned only after
    the copy had ended. The waits of our own recorder, which keep the host one step ahead, are left
    out.
    """
    calls = trace.calls
    waits = trace.named(calls, lambda name: _WAITS.fullmatch(name) is not None)
    rows = np.flatnonzero((waits | _is_blocking_copy(trace)) & ~_is_pacing(trace))
    start, end = calls.start[rows], calls.end[rows]
    origins = attribution.at(calls.thread[rows].astype(np.int64), start)
    idle, dry = _idle_after(trace, start, end)
    return Syncs(
        start=start,
        duration=calls.duration[rows],
        call=labels.translate(trace, calls.name[rows]),
        op=origins.op,
        line=origins.line,
        step=step_at(windows, start),
        idle=idle,
        dry=dry,
    )


def _is_pacing(trace: Trace) -> NDArray[np.bool_]:
    ours = nest(trace.ranges, trace.named(trace.ranges, PACING_RANGE.__eq__))
    calls = trace.calls
    return ours.innermost(calls.thread.astype(np.int64), calls.start) >= 0


def _is_blocking_copy(trace: Trace) -> NDArray[np.bool_]:
    blocking = np.zeros(len(trace.calls), np.bool_)
    pageable = trace.named(trace.device, lambda name: "Pageable" in name)
    copies = np.flatnonzero(pageable & (trace.device.kind == COPY))
    launches = find_launches(trace)
    copies = copies[launches.call[copies] >= 0]
    waited = trace.device.end[copies] <= launches.returned[copies]
    blocking[launches.call[copies[waited]]] = True
    return blocking


def _idle_after(trace: Trace, start: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return the ns for which the device had nothing to do because the host waited, and since when.

    Without the waits before it, a launch would have come earlier by their duration at most, and the
    device would have started earlier by its idle time at most. The smaller of the two counts, split
    by duration. It is 0 where the device was busy when the wait ended, and where its next work had
    been launched before.
    """
    device = trace.device
    if not len(device) or not len(start):
        return np.zeros(len(start), np.int64), start
    following = np.searchsorted(device.start, end, side="left")
    busy_until = np.concatenate(([0], np.maximum.accumulate(device.end)))[following]
    next_called = np.append(find_launches(trace).called, -1)[following]
    before_launch = (next_called < 0) | (start < next_called)
    dry = np.flatnonzero((busy_until <= end) & before_launch)
    _, first, gap = np.unique(following[dry], return_index=True, return_inverse=True)
    since = np.maximum(busy_until[dry], start[dry])[first]
    until = np.append(device.start, trace.end)[following[dry]][first]
    waited = np.bincount(gap, (end - start)[dry])
    part = np.minimum(until - since, waited) / np.maximum(waited, 1)
    idle = np.zeros(len(start), np.int64)
    idle[dry] = ((end - start)[dry] * np.maximum(part, 0)[gap]).astype(np.int64)
    return idle, np.maximum(busy_until, start)
