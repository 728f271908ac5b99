"""Nesting: which span was open at an instant, the one question behind every attribution.

Spans of one thread nest, so the parent of a span is the last one that began before it and has not
ended. Of a selection of spans ("only those of user code"), the innermost at an instant is the
nearest enclosing span of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steplab.trace.events import Ints, Spans


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
        place = self._open_at(self._axis(thread, time))
        return np.where(place >= 0, self.rows[place], -1) if len(self.rows) else place

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

    def _open_at(self, instant: Ints) -> Ints:
        place = np.searchsorted(self.begin, instant, side="right") - 1
        asked = np.flatnonzero(place >= 0)
        while len(asked):
            asked = asked[self.finish[place[asked]] <= instant[asked]]
            place[asked] = self.parent[place[asked]]
            asked = asked[place[asked] >= 0]
        return place


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
