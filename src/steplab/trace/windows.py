"""Step windows: the ranges that the profiler calls ProfilerStep#N, and whether the first is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steplab.trace.analysis import Window, WorkTable
from steplab.trace.events import Ints, Spans, Trace

STEP_RANGE = "ProfilerStep#"
# Share of the device's time in a step by work whose launch was not recorded. A host that is one
# step ahead of the device makes it all of the first step and none of the others.
CUT_SHARE = 0.05
_STEP = re.compile(rf"{STEP_RANGE}(\d{{1,18}})")  # what 64 bits hold


def step_windows(trace: Trace) -> tuple[Window, ...]:
    """Return the steps of a trace in order, without overlap; without any, one window for all.

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
        return (Window(0, trace.start, trace.end),)
    steps = _without_overlap(marks)
    if len({step.number for step in steps}) < len(steps):
        steps = [Window(count, step.start, step.end) for count, step in enumerate(steps)]
    return tuple(steps)


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


def drop_cut_step(
    windows: Sequence[Window], work: WorkTable
) -> tuple[Sequence[Window], tuple[str, ...]]:
    """Return the whole steps, and a remark where the first is cut; a single step is kept."""
    if not first_is_cut(windows[0], work):
        return windows, ()
    seen = "it shows work launched before the recording"
    if len(windows) == 1:
        return windows, (f"the only step is cut: {seen}; record more steps in a cycle",)
    return windows[1:], (f"the first step is left out: {seen}",)


def first_is_cut(first: Window, work: WorkTable) -> bool:
    """Whether the first step shows the work of a step that was launched before the recording.

    Only the part of that work which began after the recording is there, without operators and
    shapes: the device would look idle where it was busy, and ideals would be missing. A trace that
    has no launches later on either is not cut.
    """
    here = (work.start >= first.start) & (work.start < first.end)
    later = work.start >= first.end
    return _unlaunched(work, here, 0.0) > CUT_SHARE >= _unlaunched(work, later, 1.0)


def _unlaunched(work: WorkTable, rows: NDArray[np.bool_], without: float) -> float:
    """Return the share of the rows' time whose launch is not known; `without` if it is 0."""
    total = work.duration[rows].sum()
    return float(work.duration[rows & (work.launched < 0)].sum() / total) if total else without
