"""Step windows: what the profiler called ProfilerStep#N."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from steplab.trace.analysis import Window
from steplab.trace.events import Ints, Spans, Trace

_STEP = re.compile(r"ProfilerStep#(\d+)")


def windows_of(trace: Trace) -> tuple[Window, ...]:
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
