"""Step windows: what the profiler called ProfilerStep#N, and whether the first one is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steplab.trace.analysis import Window, WorkTable
from steplab.trace.events import Ints, Spans, Trace

_STEP = re.compile(r"ProfilerStep#(\d+)")


def step_windows(trace: Trace) -> tuple[Window, ...]:
    """Return the steps of a trace in order, none overlapping; without steps one window for all.

    Old traces count steps among the operators. Where several threads or profilers marked the
    same time, the longest mark counts; where numbers come twice, steps are counted anew.
    """
    numbers = {
        code: int(match[1])
        for code, text in enumerate(trace.texts)
        if (match := _STEP.fullmatch(text))
    }
    marks = _marked(trace.ranges, numbers) or _marked(trace.ops, numbers)
    if not marks:
        return (Window(0, trace.start, trace.end),)
    steps = _apart(marks)
    if len({step.number for step in steps}) < len(steps):
        steps = [Window(count, step.start, step.end) for count, step in enumerate(steps)]
    return tuple(steps)


def step_at(windows: Sequence[Window], time: ArrayLike) -> Ints:
    """Return the number of the step around each instant (ns), -1 where there is none."""
    start = np.array([window.start for window in windows], np.int64)
    end = np.array([window.end for window in windows], np.int64)
    number = np.array([window.number for window in windows], np.int64)
    instant = np.asarray(time, np.int64)
    place = np.searchsorted(start, instant, side="right") - 1
    # The last instant belongs to the window too: a trace's last event may have no length.
    return np.where((place >= 0) & (instant <= end[place]), number[place], -1)


def _marked(spans: Spans, numbers: dict[int, int]) -> list[Window]:
    rows = np.flatnonzero(np.isin(spans.name, list(numbers)))
    starts, ends = spans.start[rows].tolist(), spans.end[rows].tolist()
    names = spans.name[rows].tolist()
    return [Window(numbers[n], s, e) for n, s, e in zip(names, starts, ends, strict=True)]


def _apart(marks: Iterable[Window]) -> list[Window]:
    kept: list[Window] = []
    for mark in sorted(marks, key=lambda mark: (mark.start, -mark.end)):
        if kept and mark.start < kept[-1].end:
            longer = mark.end - mark.start > kept[-1].end - kept[-1].start
            kept[-1] = mark if longer else kept[-1]
        else:
            kept.append(mark)
    return kept


# Of the device's time in a step, by work whose launch nobody saw. A host that is ahead of the
# device by a step makes it all of the first one and none of the others.
CUT_SHARE = 0.05


def drop_cut_step(
    windows: Sequence[Window], work: WorkTable
) -> tuple[Sequence[Window], tuple[str, ...]]:
    """Return the whole steps, and a remark where the first is cut; the only one stays."""
    if not first_is_cut(windows[0], work):
        return windows, ()
    seen = "it shows work launched before the recording"
    if len(windows) == 1:
        return windows, (f"the only step is cut: {seen}; record more steps in a cycle",)
    return windows[1:], (f"the first step is left out: {seen}",)


def first_is_cut(first: Window, work: WorkTable) -> bool:
    """Whether the first step shows the work of one that was launched before.

    Of that work only what began after the recording did is there, without operator and shapes:
    idle time would be seen where the device was busy, and ideals would be missing. A trace that
    knows no launches later on either is not cut.
    """
    here = (work.start >= first.start) & (work.start < first.end)
    later = work.start >= first.end
    return _unseen(work, here, 0.0) > CUT_SHARE >= _unseen(work, later, 1.0)


def _unseen(work: WorkTable, rows: NDArray[np.bool_], without: float) -> float:
    """The share of the rows' time whose launch is not known; `without` any rows."""
    total = work.duration[rows].sum()
    return float(work.duration[rows & (work.launched < 0)].sum() / total) if total else without
