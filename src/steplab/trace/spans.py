"""Geometry of spans on a timeline: sets of instants, and which span was open at an instant.

Intervals are sets of instants; every operation is one merge, linear in numpy. Nesting answers the
question behind every attribution: spans of one thread nest, so the parent of a span is the last one
that began before it and has not ended. Of a selection of spans ("only those of user code"), the
innermost at an instant is the nearest enclosing span of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steplab.trace.events import Ints, Spans

# Whether an instant stays, by where it lies: in neither set, in a, in b, in both.
_BOTH = np.array([False, False, False, True])
_ONLY_A = np.array([False, True, False, False])


@dataclass(frozen=True)
class Intervals:
    """Half-open intervals [start, end) in ns: sorted, none empty, none touching the next.

    Build them with `union`; the constructor trusts its arguments.
    """

    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.start)

    def __or__(self, other: Intervals) -> Intervals:
        """Instants in one or both."""
        both = np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end))
        return union(*both)

    def __and__(self, other: Intervals) -> Intervals:
        """Instants in both."""
        return _combine(self, other, _BOTH)

    def __sub__(self, other: Intervals) -> Intervals:
        """Instants in this set and not in the other."""
        return _combine(self, other, _ONLY_A)

    def clip(self, low: int, high: int) -> Intervals:
        """Return the part within [low, high)."""
        first = int(np.searchsorted(self.end, low, "right"))
        last = max(first, int(np.searchsorted(self.start, high, "left")))
        start = np.maximum(self.start[first:last], low)
        end = np.minimum(self.end[first:last], high)
        return Intervals(start[start < end], end[start < end])

    @property
    def total(self) -> int:
        """Total length, ns."""
        return int((self.end - self.start).sum())

    def within(self, low: ArrayLike, high: ArrayLike) -> Ints:
        """Return how many ns of each [low, high) lie in the set; both may be arrays."""
        return self._before(np.asarray(high)) - self._before(np.asarray(low))

    def _before(self, time: Ints) -> Ints:
        """Return how many ns of the set lie before each time."""
        lengths = np.concatenate(([0], np.cumsum(self.end - self.start)))
        begun = np.searchsorted(self.start, time, "right")
        if not len(self):
            return np.zeros_like(begun)
        still_to_come = np.maximum(self.end[np.maximum(begun, 1) - 1] - time, 0)
        return lengths[begun] - np.where(begun > 0, still_to_come, 0)


def union(start: ArrayLike, end: ArrayLike) -> Intervals:
    """Return the set that spans cover, in any order and with any overlap."""
    starts, ends = np.asarray(start, np.int64), np.asarray(end, np.int64)
    some = starts < ends
    starts, ends = starts[some], ends[some]
    if not len(starts):
        return EMPTY
    # A stable sort is linear where the input has few sorted runs, as the tables of a trace do.
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    breaks = np.flatnonzero(starts[1:] > reached[:-1])
    first = np.concatenate(([0], breaks + 1))
    last = np.concatenate((breaks, [len(starts) - 1]))
    return Intervals(starts[first], reached[last])


EMPTY = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


def _combine(a: Intervals, b: Intervals, stays: NDArray[np.bool_]) -> Intervals:
    times = np.concatenate((a.start, a.end, b.start, b.end))
    changes = np.repeat([1, -1, 2, -2], [len(a), len(a), len(b), len(b)])
    order = np.argsort(times, kind="stable")
    times, place = times[order], np.cumsum(changes[order])
    kept = stays[place[:-1]] & (times[1:] > times[:-1])
    return union(times[:-1][kept], times[1:][kept])


@dataclass(frozen=True)
class Nesting:
    """Spans sorted by thread, start and descending length; `parent` is an index in that order."""

    rows: Ints  # row of each span in its table
    parent: Ints  # index of the enclosing span, -1: none
    begin: Ints  # start on one axis, on which thread follows thread
    finish: Ints  # end on that axis, not later than that of the parent
    size: int  # rows of the table
    origin: int  # ns: where the part of every thread begins
    width: int  # ns: how long that part is

    def innermost(self, thread: ArrayLike, time: ArrayLike) -> Ints:
        """Return the row of the innermost span at each (thread, ns); -1: none was open."""
        borders, row = self._changes
        place = np.searchsorted(borders, self._axis(thread, time), side="right")
        return row[place]

    def parents(self) -> Ints:
        """Return for every row of the table the row of its parent; -1 also for rows left out."""
        found = np.full(self.size, -1, np.int64)
        inner = self.parent >= 0
        found[self.rows[inner]] = self.rows[self.parent[inner]]
        return found

    def self_time(self) -> Ints:
        """Return for every row of the table its ns outside its children; 0 if left out."""
        length = self.finish - self.begin
        inner = self.parent >= 0
        children = np.bincount(self.parent[inner], length[inner], len(length)).astype(np.int64)
        found = np.zeros(self.size, np.int64)
        found[self.rows] = length - children
        return found

    def _axis(self, thread: ArrayLike, time: ArrayLike) -> Ints:
        within = np.clip(np.asarray(time, np.int64) - self.origin, 0, self.width - 1)
        return np.asarray(thread, np.int64) * self.width + within

    @cached_property
    def _changes(self) -> tuple[Ints, Ints]:
        """Return when the innermost span changes, and the row that is open from then on.

        The rows have one entry more: the first is before any change. At one instant spans end
        before others begin, inner ones first, and begin after them, outer ones first; the last of
        these changes counts.
        """
        place = np.flatnonzero(self.begin < self.finish)  # a span without length is never open
        time = np.concatenate((self.finish[place], self.begin[place]))
        after = np.concatenate((self.parent[place], place))
        order = np.lexsort((np.concatenate((-1 - place, place)), time))
        rows = np.append(self.rows, -1)  # place -1: none
        return time[order], np.concatenate(([-1], rows[after[order]]))


def nest(
    spans: Spans, chosen: NDArray[np.bool_] | None = None, across_threads: bool = False
) -> Nesting:
    """Nest the `chosen` spans of a table (by default all), each on its own thread.

    `across_threads` treats all threads as thread 0. Spans that overlap without nesting, as in old
    traces with whole microseconds, end with their parent.
    """
    rows = np.arange(len(spans)) if chosen is None else np.flatnonzero(chosen)
    start, end = spans.start[rows], spans.start[rows] + spans.duration[rows]
    thread = np.zeros(len(rows), np.int64) if across_threads else spans.thread[rows].astype(int)
    # One before the first start, so that an earlier instant lies in no span.
    origin = int(start.min(initial=0)) - 1 if len(rows) else 0
    width = int(end.max(initial=origin)) - origin + 2
    begin, finish = thread * width + (start - origin), thread * width + (end - origin)
    order = np.lexsort((-finish, begin))
    begin, finish = begin[order], finish[order]
    parent, finish = _parents(begin, finish)
    return Nesting(rows[order], parent, begin, finish, len(spans), origin, width)


def _parents(begin: Ints, finish: Ints) -> tuple[Ints, Ints]:
    """Return parents, and ends cut to those of the parents, by one pass with a stack.

    A loop over lists: a million spans take half a second, and overlaps need no second method.
    """
    starts, ends = begin.tolist(), finish.tolist()
    parents = [-1] * len(starts)
    open_places: list[int] = []
    open_ends: list[int] = []
    for place, start in enumerate(starts):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
            open_places.pop()
        end = ends[place]
        if open_ends:
            parents[place] = open_places[-1]
            if end > open_ends[-1]:
                end = ends[place] = open_ends[-1]
        open_places.append(place)
        open_ends.append(end)
    return np.array(parents, np.int64), np.array(ends, np.int64)
