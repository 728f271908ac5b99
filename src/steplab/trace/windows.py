"""Step windows: the ranges that the profiler calls ProfilerStep#N, and which of them are cut.

Where there are none, a step is what lies between two updates of the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steplab.trace.analysis import Window, WorkTable
from steplab.trace.events import Ints, Spans, Trace

STEP_RANGE = "ProfilerStep#"
UPDATE_RANGE = "Optimizer.step#"
MIN_UPDATES = 3
# Share of the device's time in a step by work whose launch was not recorded. A host that is one
# step ahead of the device makes it all of the first step and none of the others.
CUT_SHARE = 0.05
# Share of the device's time in a step by work that the step itself launched. In a trace of a host
# that is ahead by a part of a step it is well above this, and 0 where it is ahead by whole steps.
AHEAD_SHARE = 0.3
_STEP = re.compile(rf"{STEP_RANGE}(\d{{1,18}})")  # what 64 bits hold


def step_windows(trace: Trace) -> tuple[Window, ...]:
    """Return the steps of a trace in order, without overlap; without any, one window for all.

    Without marks of the profiler a step goes from the end of an update to the end of the next.

    Old traces have steps among the operators. Where several threads or profilers marked the same
    time, the longest mark counts; where a number occurs twice, steps are renumbered.
    """
    numbers = {
        code: int(match[1])
        for code, text in enumerate(trace.texts)
        if (match := _STEP.fullmatch(text))
    }
    marks = _marked(trace.ranges, numbers) or _marked(trace.ops, numbers)
    if not marks:
        return _between_updates(trace) or (Window(0, trace.start, trace.end),)
    steps = _without_overlap(marks)
    if len({step.number for step in steps}) < len(steps):
        steps = [Window(count, step.start, step.end) for count, step in enumerate(steps)]
    return tuple(steps)


def are_marked(windows: Sequence[Window], trace: Trace) -> bool:
    """Whether something marked the steps; if not, all of the recording is one window."""
    return windows != (Window(0, trace.start, trace.end),)


def _between_updates(trace: Trace) -> tuple[Window, ...]:
    """Return the windows between updates of the optimizer that is called most often.

    None for less than three updates: before the first there may be anything.
    """
    ranges = trace.ranges
    names = trace.named(ranges, lambda name: name.startswith(UPDATE_RANGE))
    if not names.any():
        return ()
    codes, counts = np.unique(ranges.name[names], return_counts=True)
    ends = np.unique(ranges.end[ranges.name == codes[counts.argmax()]]).tolist()
    if len(ends) < MIN_UPDATES:
        return ()
    return tuple(Window(n, s, e) for n, (s, e) in enumerate(pairwise(ends)))


def step_at(windows: Sequence[Window], time: ArrayLike) -> Ints:
    """Return the number of the step around each instant (ns), -1 where there is none."""
    start, end = borders(windows)
    number = np.array([window.number for window in windows], np.int64)
    instant = np.asarray(time, np.int64)
    index = np.searchsorted(start, instant, side="right") - 1
    # The end belongs to the window too: the last event of a trace may have no length.
    return np.where((index >= 0) & (instant <= end[index]), number[index], -1)


def step_index(windows: Sequence[Window], time: Ints) -> Ints:
    """Return the index of the step [start, end) around each instant (ns), -1: none."""
    start, end = borders(windows)
    index = np.searchsorted(start, time, side="right") - 1
    return np.where((index >= 0) & (time < end[index]), index, -1)


def borders(windows: Sequence[Window]) -> tuple[Ints, Ints]:
    """Return starts and ends of the steps, ns."""
    start = np.array([window.start for window in windows], np.int64)
    return start, np.array([window.end for window in windows], np.int64)


def _marked(spans: Spans, numbers: dict[int, int]) -> list[Window]:
    rows = np.flatnonzero(np.isin(spans.name, list(numbers)))
    starts, ends = spans.start[rows].tolist(), spans.end[rows].tolist()
    names = spans.name[rows].tolist()
    return [Window(numbers[n], s, e) for n, s, e in zip(names, starts, ends, strict=True)]


def _without_overlap(marks: Iterable[Window]) -> list[Window]:
    kept: list[Window] = []
    for mark in sorted(marks, key=lambda mark: (mark.start, -mark.end)):
        if kept and mark.start < kept[-1].end:
            longer = mark.end - mark.start > kept[-1].end - kept[-1].start
            kept[-1] = mark if longer else kept[-1]
        else:
            kept.append(mark)
    return kept


def device_windows(
    windows: tuple[Window, ...], work: WorkTable
) -> tuple[tuple[Window, ...], tuple[str, ...]]:
    """Return the steps as the device sees them where the host is a step or more ahead of it.

    Such a host marks steps long before the device begins them: what lies in a mark was launched
    before it, and its length is that of launching. The device's step goes from the end of one
    step's work to the end of the next's, so the first one is left out.
    """
    numbers = np.array([window.number for window in windows], np.int64)
    at = step_index(windows, work.start)
    total, own = (
        np.bincount(at[rows], work.duration[rows], len(windows))
        for rows in (at >= 0, (at >= 0) & (work.step == numbers[at]))
    )
    busy = total > 0
    if busy.sum() < 2 or np.median(own[busy] / total[busy]) > AHEAD_SHARE:
        return windows, ()
    order = np.argsort(numbers)
    launched = np.flatnonzero(np.isin(work.step, numbers))
    ends = np.full(len(windows), -1, np.int64)
    place = order[np.searchsorted(numbers[order], work.step[launched])]
    np.maximum.at(ends, place, (work.start + work.duration)[launched])
    if not (np.diff(ends, prepend=0) > 0).all():
        return windows, ()
    borders_ = pairwise(ends.tolist())
    steps = tuple(Window(w.number, *ns) for w, ns in zip(windows[1:], borders_, strict=True))
    remark = (
        "the host is a step or more ahead: a step goes from the end of one step's work on the "
        "device to the end of the next's; the first is left out"
    )
    return steps, (remark,)


def drop_cut_steps(
    windows: Sequence[Window], work: WorkTable, trace: Trace
) -> tuple[Sequence[Window], tuple[str, ...]]:
    """Return the whole steps, and a remark where the first ones are cut; one is always kept."""
    count = count_cut(windows, work, trace)
    if not count:
        return windows, ()
    seen = "work launched before the recording"
    if count == len(windows):
        which = "the only step is cut: it shows" if count == 1 else "all steps are cut: they show"
        advice = "its length is not the step's; record more steps in a cycle"
        return windows, (f"{which} {seen}; {advice}",)
    which = "the first step is" if count == 1 else f"the first {count} steps are"
    return windows[count:], (f"{which} left out, with {seen}",)


def count_cut(windows: Sequence[Window], work: WorkTable, trace: Trace) -> int:
    """Return how many steps at the beginning show work that was launched before the recording.

    Only the part of that work which began after the recording is there, without operators and
    shapes: the device would look idle where it was busy, and ideals would be missing. A host that
    is several steps ahead cuts several. A trace that has no launches later on either is not cut,
    unless it has some whose work came after its end.
    """
    cut = [_unlaunched(work, _within(work, window), 0.0) > CUT_SHARE for window in windows]
    count = (*cut, False).index(False)
    later = work.start >= windows[count - 1].end
    without_work = 0.0 if _launches_what_is_not_there(trace) else 1.0
    known_later = _unlaunched(work, later, without_work) <= CUT_SHARE
    return count if known_later and not any(cut[count:]) else 0


def _launches_what_is_not_there(trace: Trace) -> bool:
    """Whether most launches of kernels have no work in the trace."""
    launches = trace.named(trace.calls, lambda name: "LaunchKernel" in name)
    done = np.isin(trace.calls.correlation[launches], trace.device.correlation)
    return bool(len(done)) and done.mean() < 0.5


def _within(work: WorkTable, window: Window) -> NDArray[np.bool_]:
    inside: NDArray[np.bool_] = (work.start >= window.start) & (work.start < window.end)
    return inside


def _unlaunched(work: WorkTable, rows: NDArray[np.bool_], without: float) -> float:
    """Return the share of the rows' time whose launch is not known; `without` if it is 0."""
    total = work.duration[rows].sum()
    return float(work.duration[rows & (work.launched < 0)].sum() / total) if total else without
