"""Where the device had nothing to do: every idle instant and its cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from steplab.trace.analysis import Floats, Syncs, Window, Work
from steplab.trace.events import Ints, Spans, Trace
from steplab.trace.intervals import Intervals, union_of
from steplab.trace.phases import phase_of_range

IDLE_TERMS = ("data wait", "synchronisation", "launch", "dispatch")


def idle_terms(
    trace: Trace, windows: Sequence[Window], work: Work, syncs: Syncs
) -> Mapping[str, Intervals]:
    """Return the idle instants of the device by term; `work` holds the rows of trace.device.

    A gap that device work k ends is known from k's launch: before the launch call returned the
    host was late, for a reason that its data ranges and sync calls tell; after that the device
    was. A gap without a known launch is explained by the host's own events, as far as they cover.
    """
    start, end, row = _bounds(windows, work)
    launched = _launch_times(trace, work, start, row)
    known = launched >= 0
    until = np.clip(launched, start, end)
    late = union_of(start[known], until[known])
    unclear = union_of(start[~known], end[~known])
    open_ = late | unclear
    data = data_ranges(trace) & open_
    sync = (union_of(syncs.start, syncs.start + syncs.duration) & open_) - data
    launch = (late | (unclear & host_events(trace))) - data - sync
    dispatch = union_of(until[known], end[known])
    return dict(zip(IDLE_TERMS, (data, sync, launch, dispatch), strict=True))


def idle_before(
    trace: Trace, windows: Sequence[Window], work: Work, syncs: Syncs, window: Window
) -> Mapping[str, Floats]:
    """Return by term the idle ns of a window that each row of `work` ended by starting.

    One entry more than `work` has rows: the last holds what no work ended. The entries of a term
    sum to what the budget has for it in the window.
    """
    start, end, row = _bounds(windows, work)
    ended_by = np.where(row >= 0, row, len(work))
    low, high = (np.clip(border, window.start, window.end) for border in (start, end))

    def by_row(instants: Intervals) -> Floats:
        ns = instants.within(low, high)
        return np.bincount(ended_by, ns, len(work) + 1).astype(np.float64)

    terms = idle_terms(trace, windows, work, syncs)
    return {name: by_row(instants) for name, instants in terms.items()}


def launch_calls(trace: Trace) -> Ints:
    """Return when the host calls began that started device work, ns; a replayed graph is one."""
    return trace.calls.start[np.isin(trace.calls.correlation, trace.device.correlation)]


def begun_in(times: Ints, window: Window) -> int:
    """Return how many of the sorted times lie in a step."""
    return int(np.diff(np.searchsorted(times, (window.start, window.end)))[0])


def data_ranges(trace: Trace) -> Intervals:
    """Return when the thread of the steps was fetching a batch; others may fetch ahead."""
    ranges = trace.ranges
    is_data = _named(trace, lambda name: phase_of_range(name) == "data")[ranges.name]
    is_step = ~_named(trace, _is_no_step)[ranges.name]
    if is_step.any():
        is_data &= np.isin(ranges.thread, ranges.thread[is_step])
    return union_of(ranges.start[is_data], ranges.end[is_data])


def host_events(trace: Trace) -> Intervals:
    """Return when the host was in anything recorded; a step's own range explains nothing."""
    ranges = _cover(trace.ranges, _named(trace, _is_no_step))
    return ranges | operators(trace) | _cover(trace.calls) | _cover(trace.python)


def operators(trace: Trace) -> Intervals:
    """Return when the host was in an operator; old traces have steps among them."""
    return _cover(trace.ops, _named(trace, _is_no_step))


def _is_no_step(name: str) -> bool:
    return not name.startswith("ProfilerStep#")


def _named(trace: Trace, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
    return np.array([wanted(text) for text in trace.texts], bool)


def _cover(spans: Spans, wanted: NDArray[np.bool_] | None = None) -> Intervals:
    """Return the union of spans; `wanted` picks by name, one entry per text of the trace."""
    rows = slice(None) if wanted is None else wanted[spans.name]
    return union_of(spans.start[rows], spans.end[rows])


def _bounds(windows: Sequence[Window], work: Work) -> tuple[Ints, Ints, Ints]:
    """Return start, end and the Work row that ends it of every gap, borders of the trace too."""
    busy = union_of(work.start, work.start + work.duration)
    low = min([window.start for window in windows] + busy.start[:1].tolist())
    high = max([window.end for window in windows] + busy.end[-1:].tolist())
    start = np.concatenate(([low], busy.end))
    end = np.concatenate((busy.start, [high]))
    row = np.concatenate((np.searchsorted(work.start, busy.start, "left"), [-1]))
    some = start < end
    return start[some], end[some], row[some]


def _launch_times(trace: Trace, work: Work, start: Ints, row: Ints) -> Ints:
    """Return when the launch call of each gap's next work returned; -1 where that is unknown.

    Work of a replayed graph that is already running needs no further launch.
    """
    launched = np.where(row >= 0, work.launched[row], -1)
    correlation = trace.device.correlation
    before = np.maximum(row, 1) - 1
    same_call = (row > 0) & (correlation[row] == correlation[before]) & (launched >= 0)
    return np.where(same_call, start, launched)
