"""What went on during one step, lane by lane: phases of the host, its waits, threads, streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.record.budget import Budget
from steplab.report.pages.colours import category_class, phase_class
from steplab.trace.analysis import Analysis, Window
from steplab.trace.events import Codes, Ints, Spans, Trace
from steplab.trace.phases import phase_of_range

PHASES_LABEL = "host phases"
PROFILER_STEP = "ProfilerStep#"
MOST_THREADS = 4  # of the host beside a device, the busiest first; a loader may have dozens
MOST_LANES = 10  # of streams, or of threads without a device


@dataclass(frozen=True)
class Lane:
    """Boxes on one line; codes index `names` and `classes`."""

    label: str
    start: Ints  # ns
    end: Ints  # ns
    name: Codes
    names: tuple[str, ...]
    colour: Codes
    classes: tuple[str, ...]  # CSS classes

    def within(self, window: Window) -> Lane:
        """Cut the lane to a step; zero-length boxes go."""
        start, end = np.maximum(self.start, window.start), np.minimum(self.end, window.end)
        kept = end > start
        return Lane(
            *(self.label, start[kept], end[kept], self.name[kept], self.names),
            *(self.colour[kept], self.classes),
        )


def typical_window(analysis: Analysis) -> Window:
    """Return the step whose budget is shown."""
    number = typical_number(analysis.budget)
    return next((w for w in analysis.windows if w.number == number), analysis.windows[0])


def typical_number(budget: Budget) -> int:
    """Return the number of the typical step; 0 where there is none."""
    return budget.typical.number if budget.steps else 0


def lanes_of(analysis: Analysis) -> list[Lane]:
    """Return the lanes of the typical step that have anything in them, host first."""
    trace = analysis.trace
    lanes = [_phases(trace), _waits(analysis)]
    on_device = len(trace.device) > 0
    lanes += _threads(trace) if on_device else _work_lanes(analysis, trace.ops, "thread")
    if on_device:
        lanes += _work_lanes(analysis, trace.device, "stream")
    cut = [lane.within(typical_window(analysis)) for lane in lanes]
    return [lane for lane in cut if len(lane.start)]


def _phases(trace: Trace) -> Lane:
    """Outermost phases of the host over its outermost other ranges; not the steps themselves."""
    ranges = trace.ranges
    used, found = np.unique(ranges.name, return_inverse=True)
    codes = found.astype(np.int32)
    names = tuple(trace.texts[code] for code in used)
    phases = [phase_of_range(name) for name in names]
    steps = np.array([name.startswith(PROFILER_STEP) for name in names], dtype=bool)[codes]
    known = np.array([phase is not None for phase in phases], dtype=bool)[codes]
    others, own = (np.flatnonzero(chosen) for chosen in (~steps & ~known, known))
    rows = np.concatenate([some[_outermost(ranges, some)] for some in (others, own)])
    rows = rows[np.argsort(ranges.start[rows], kind="stable")]
    classes = tuple(phase_class(phase or "") for phase in phases)
    code = codes[rows]
    return Lane(PHASES_LABEL, ranges.start[rows], ranges.end[rows], code, names, code, classes)


def _waits(analysis: Analysis) -> Lane:
    """Host calls that waited for the device."""
    syncs, labels = analysis.syncs, analysis.work.labels
    grey = np.zeros(len(syncs.start), dtype=np.int32)
    end = syncs.start + syncs.duration
    classes = ("t-synchronisation",)
    return Lane("host waits", syncs.start, end, syncs.call, labels, grey, classes)


def _threads(trace: Trace) -> list[Lane]:
    """Outermost operators of the busiest host threads, all of one colour."""
    ops = trace.ops
    busy = np.bincount(ops.thread, weights=ops.duration, minlength=len(trace.threads))
    lanes = []
    for thread in np.argsort(-busy, kind="stable")[:MOST_THREADS]:
        rows = np.flatnonzero(ops.thread == thread)
        rows = rows[_outermost(ops, rows)]
        grey = np.zeros(len(rows), dtype=np.int32)
        label = f"thread {trace.threads[thread]}"
        names = ops.name[rows]
        lane = Lane(label, ops.start[rows], ops.end[rows], names, trace.texts, grey, ("c-other",))
        lanes.append(lane)
    return lanes


def _work_lanes(analysis: Analysis, spans: Spans, kind: str) -> list[Lane]:
    """The work by category, one lane per stream, or per thread where there is no GPU.

    Rows of the work and of `spans` are the same ones; an operator is drawn at its start with its
    self time. The busiest come first, and beyond MOST_LANES share the last lane.
    """
    work, trace = analysis.work, analysis.trace
    classes = tuple(category_class(label) for label in work.labels)
    busy = np.bincount(spans.thread, weights=work.duration, minlength=len(trace.threads))
    ranked = [int(thread) for thread in np.argsort(-busy, kind="stable") if busy[thread]]
    groups = [([thread], f"{kind} {trace.threads[thread]}") for thread in ranked[:MOST_LANES]]
    if rest := ranked[MOST_LANES:]:
        groups.append((rest, f"{len(rest)} other {kind}s"))
    lanes = []
    for threads, label in groups:
        rows = np.flatnonzero(np.isin(spans.thread, threads))
        start, end = work.start[rows], work.start[rows] + work.duration[rows]
        names, colours = work.name[rows], work.category[rows]
        lanes.append(Lane(label, start, end, names, work.labels, colours, classes))
    return lanes


def _outermost(spans: Spans, rows: Ints) -> NDArray[np.bool_]:
    """Which of `rows` (sorted by start) lie in none of the others."""
    if not len(rows):
        return np.zeros(0, dtype=bool)
    ends = np.maximum.accumulate(spans.end[rows])
    before = np.concatenate([[np.iinfo(np.int64).min], ends[:-1]])
    return spans.start[rows] >= before
