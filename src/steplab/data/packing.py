"""Pieces of different lengths into windows of one length: best fit, the longest first.

Lengths are packed, not pieces: windows that were filled alike are one group, so that millions of
pieces cost no more than a few thousand groups. Which piece lies where follows by arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Run(NamedTuple):
    """`each` pieces of one length in every window of a group; `first` is window 0's first one.

    Pieces are counted from the longest to the shortest.
    """

    first: int
    each: int
    length: int  # points


@dataclass(frozen=True)
class Group:
    """Windows that were filled alike, and the points that are free at the end of each."""

    windows: int
    room: int
    runs: tuple[Run, ...] = ()

    def part(self, start: int, windows: int) -> Group:
        """Return some of the windows, from number `start` on, as a group of their own."""
        moved = (Run(run.first + start * run.each, run.each, run.length) for run in self.runs)
        return Group(windows, self.room, tuple(moved))

    def filled(self, run: Run, patch: int) -> Group:
        """Return the group after the pieces of `run` were put in."""
        room = self.room - run.each * footprint(run.length, patch)
        return Group(self.windows, room, (*self.runs, run))


def footprint(length: int, patch: int) -> int:
    """Return the points up to where the next piece can begin: whole tokens."""
    return -(-length // patch) * patch


def pack(counts: NDArray[np.int64], window: int, patch: int) -> list[Group]:
    """Return the groups of windows that hold `counts[n]` pieces of n points, for every n.

    A piece begins at a multiple of `patch`; only the last one may use a point beyond the last
    whole token, where a window has one more point than its tokens.
    """
    shelf, first = _Shelf(), 0
    for length in range(len(counts) - 1, 0, -1):
        left = int(counts[length])
        while left:
            group = shelf.tightest(length) or Group(left, window)
            each = min(left, (group.room - length) // footprint(length, patch) + 1)
            windows = min(group.windows, left // each)
            shelf.add(group.part(0, windows).filled(Run(first, each, length), patch))
            if group.runs and windows < group.windows:
                shelf.add(group.part(windows, group.windows - windows))
            first, left = first + windows * each, left - windows * each
    return shelf.groups()


class _Shelf:
    """Groups by the room they have left."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # rising
        self._groups: dict[int, deque[Group]] = {}

    def add(self, group: Group) -> None:
        """Put a group where its room is found."""
        if group.room not in self._groups:
            insort(self._rooms, group.room)
            self._groups[group.room] = deque()
        self._groups[group.room].append(group)

    def tightest(self, length: int) -> Group | None:
        """Take out the group with the least room in which `length` points fit."""
        place = bisect_left(self._rooms, length)
        if place == len(self._rooms):
            return None
        room = self._rooms[place]
        group = self._groups[room].popleft()
        if not self._groups[room]:
            del self._groups[room], self._rooms[place]
        return group

    def groups(self) -> list[Group]:
        """Return all groups, the fullest first."""
        return [group for room in self._rooms for group in self._groups[room]]
