"""One step over time: phases and waits of the host, its threads, the streams of the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steplab.core import units
from steplab.report.charts import plot
from steplab.report.charts.colors import category_class, phase_class
from steplab.report.charts.plot import Scale, axis_lane
from steplab.report.markup import NOTHING, Html, element, join
from steplab.trace.analysis import Analysis, Window
from steplab.trace.events import Codes, Ints, Spans, Trace
from steplab.trace.phases import phase_of_range

PHASES_LABEL = "host phases"
PROFILER_STEP = "ProfilerStep#"
MAX_THREADS = 4  # of the host beside a device, the busiest first; a loader may have dozens
MAX_LANES = 10  # of streams, or of threads without a device
MAX_BOXES = 3000  # in all lanes together: a picture is some thousand pixels wide


class Names:
    """Texts that boxes name by their number, each kept once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of `text`."""
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def texts(self) -> list[str]:
        """All texts, by number."""
        return list(self.numbers)


def timeline_chart(analysis: Analysis, names: Names) -> Html:
    """Return the lanes of the typical step over one axis; hovering a box tells its name."""
    window = typical_window(analysis)
    if window.end <= window.start:
        return NOTHING
    lanes = step_lanes(analysis)
    boxes = thin(lanes, max(window.end - window.start, 1))
    rows = [_row(lane, own, window, names) for lane, own in zip(lanes, boxes, strict=True)]
    return join([*rows, axis_lane(Scale(0.0, (window.end - window.start) / 1e6))])


def _row(lane: Lane, boxes: list[Box], window: Window, names: Names) -> Html:
    drawn = [_rectangle(lane, box, window, names) for box in boxes]
    if lane.label == PHASES_LABEL:
        following = [*(box.start for box in boxes[1:]), window.end]
        drawn += [_name(lane, *pair, window) for pair in zip(boxes, following, strict=True)]
    return plot.lane(lane.label, drawn)


def _rectangle(lane: Lane, box: Box, window: Window, names: Names) -> Html:
    length = window.end - window.start
    time = units.milliseconds((box.end - box.start) / 1e6)
    others = f" and {box.count - 1} more" if box.count > 1 else ""
    return element(
        "rect",
        x=f"{(box.start - window.start) / length * 100:.3f}%",
        width=f"{max((box.end - box.start) / length * 100, 0.03):.3f}%",
        height="22",
        class_=f"box {lane.classes[box.color]}",
        data_n=str(names.number(lane.names[box.name])),
        data_d=f"{time}{others}",
    )


def _name(lane: Lane, box: Box, following: int, window: Window) -> Html:
    """A phase's name, cut where the next box begins; none below a twentieth of the width."""
    length = window.end - window.start
    free = (min(box.end, following) - box.start) / length
    if box.count > 1 or free < 0.05:
        return NOTHING
    x = f"{(box.start - window.start) / length * 100:.3f}%"
    name = element("text", lane.names[box.name], x="6", y="15", class_="inside")
    return element("svg", name, x=x, width=f"{free * 100:.3f}%", height="22")


@dataclass(frozen=True)
class Lane:
    """Boxes on one line; codes index `names` and `classes`."""

    label: str
    start: Ints  # ns
    end: Ints  # ns
    name: Codes
    names: tuple[str, ...]
    color: Codes
    classes: tuple[str, ...]  # CSS classes

    def within(self, window: Window) -> Lane:
        """Cut the lane to a step and drop boxes without length."""
        start, end = np.maximum(self.start, window.start), np.minimum(self.end, window.end)
        kept = end > start
        name, color = self.name[kept], self.color[kept]
        return replace(self, start=start[kept], end=end[kept], name=name, color=color)


def typical_window(analysis: Analysis) -> Window:
    """Return the step whose budget is shown."""
    budget = analysis.budget
    number = budget.typical.number if budget.steps else 0
    return next((w for w in analysis.windows if w.number == number), analysis.windows[0])


def step_lanes(analysis: Analysis) -> list[Lane]:
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
    gray = np.zeros(len(syncs.start), dtype=np.int32)
    end = syncs.start + syncs.duration
    classes = ("t-synchronization",)
    return Lane("host waits", syncs.start, end, syncs.call, labels, gray, classes)


def _threads(trace: Trace) -> list[Lane]:
    """Outermost operators of the busiest host threads, all of one color."""
    ops = trace.ops
    busy = np.bincount(ops.thread, weights=ops.duration, minlength=len(trace.threads))
    lanes = []
    for thread in np.argsort(-busy, kind="stable")[:MAX_THREADS]:
        rows = np.flatnonzero(ops.thread == thread)
        rows = rows[_outermost(ops, rows)]
        gray = np.zeros(len(rows), dtype=np.int32)
        label = f"thread {trace.threads[thread]}"
        names = ops.name[rows]
        lane = Lane(label, ops.start[rows], ops.end[rows], names, trace.texts, gray, ("c-other",))
        lanes.append(lane)
    return lanes


def _work_lanes(analysis: Analysis, spans: Spans, kind: str) -> list[Lane]:
    """The work by category, one lane per stream, or per thread where there is no GPU.

    Rows of the work and of `spans` are the same ones; an operator is drawn at its start with its
    self time. The busiest come first, and beyond MAX_LANES share the last lane.
    """
    work, trace = analysis.work, analysis.trace
    classes = tuple(category_class(label) for label in work.labels)
    busy = np.bincount(spans.thread, weights=work.duration, minlength=len(trace.threads))
    ranked = [int(thread) for thread in np.argsort(-busy, kind="stable") if busy[thread]]
    groups = [([thread], f"{kind} {trace.threads[thread]}") for thread in ranked[:MAX_LANES]]
    if rest := ranked[MAX_LANES:]:
        groups.append((rest, f"{len(rest)} other {kind}s"))
    lanes = []
    for threads, label in groups:
        rows = np.flatnonzero(np.isin(spans.thread, threads))
        start, end = work.start[rows], work.start[rows] + work.duration[rows]
        names, colors = work.name[rows], work.category[rows]
        lanes.append(Lane(label, start, end, names, work.labels, colors, classes))
    return lanes


def _outermost(spans: Spans, rows: Ints) -> NDArray[np.bool_]:
    """Which of `rows` (sorted by start) lie in none of the others."""
    if not len(rows):
        return np.zeros(0, dtype=bool)
    ends = np.maximum.accumulate(spans.end[rows])
    before = np.concatenate([[np.iinfo(np.int64).min], ends[:-1]])
    return spans.start[rows] >= before


@dataclass(frozen=True)
class Box:
    """One rectangle; it holds `count` events, of which the longest gives name and color."""

    start: int  # ns
    end: int
    name: int  # code in Lane.names
    color: int  # code in Lane.classes
    count: int = 1


def thin(lanes: Sequence[Lane], span: int, most: int = MAX_BOXES) -> list[list[Box]]:
    """Return the boxes of every lane, `most` at most in all.

    Events shorter than a slot of time are merged with the short ones that begin in the same slot;
    slots grow until the boxes are few enough. `span` (ns) is the length of the picture.
    """
    slots = most
    while slots > 1 and _count(lanes, span // slots) > most:
        slots //= 2
    slot = span // slots
    if _count(lanes, slot) > most:
        slot = span + 1  # events as long as the picture, on top of each other
    return [_boxes(lane, slot) for lane in lanes]


def _count(lanes: Sequence[Lane], slot: int) -> int:
    """Return how many boxes there would be."""
    short = [lane.start[lane.end - lane.start < slot] for lane in lanes]
    long = sum(len(lane.start) for lane in lanes) - sum(map(len, short))
    return long + sum(len(np.unique(start // slot)) for start in short if len(start))


def _boxes(lane: Lane, slot: int) -> list[Box]:
    duration = lane.end - lane.start
    short = duration < slot
    columns = [column[~short].tolist() for column in (lane.start, lane.end, lane.name, lane.color)]
    boxes = [Box(*values) for values in zip(*columns, strict=True)]
    rows = np.flatnonzero(short)
    if len(rows):
        # Within a slot the longest comes first, and represents the others.
        slots = lane.start[rows] // slot
        rows = rows[np.lexsort((-duration[rows], slots))]
        slots = lane.start[rows] // slot
        first = np.flatnonzero(np.concatenate([[True], slots[1:] != slots[:-1]]))
        boxes += _merged(lane, rows, first)
    return sorted(boxes, key=lambda box: box.start)


def _merged(lane: Lane, rows: NDArray[np.int64], first: NDArray[np.int64]) -> list[Box]:
    starts = np.minimum.reduceat(lane.start[rows], first)
    ends = np.maximum.reduceat(lane.end[rows], first)
    counts = np.diff([*first, len(rows)])
    names, colors = lane.name[rows[first]], lane.color[rows[first]]
    values = zip(starts, ends, names, colors, counts, strict=True)
    return [Box(*map(int, row)) for row in values]
