"""Sets of instants as sorted, disjoint intervals. Every operation is one merge: linear in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steplab.trace.events import Ints

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
