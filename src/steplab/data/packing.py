"""Windows in which several short pieces lie side by side, each a document of its own.

Pieces of different lengths go into windows of one length by best fit, the longest first. Lengths
are packed, not pieces: windows that were filled the same way are one group, so millions of pieces
cost no more than a few thousand groups, and which piece lies where follows by arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steplab.data.series import SeriesSet
from steplab.data.windows import MIN_POINTS, NormalizeMode, SeriesWindows, full_windows

PackedWindow = tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.int32]]
PADDING = -1  # the document of points that belong to no series


class PackedWindows(SeriesWindows[PackedWindow]):
    """Windows (values, mask, documents): full ones as in `Windows`, then packed ones.

    Packed are short series and tails; documents are numbered from 0 in every window, and a piece
    with fewer than 2 finite points is padding.

    A tail is what follows the last full window of a series: it begins where the next window would,
    and is used if it has points that no window has. Pieces begin at a multiple of `patch_length`.
    The layout depends on the lengths alone. 16 bytes per series.
    """

    def __init__(
        self,
        series: SeriesSet,
        length: int,
        stride: int,
        normalize: NormalizeMode = "series",
        patch_length: int = 1,
    ) -> None:
        super().__init__(series, length, stride, normalize)
        self.patch_length = patch_length
        pieces = piece_lengths(series.lengths, length, stride)
        # The longest first; equal lengths in the order of the series.
        self._order = np.argsort(-pieces, kind="stable")[: int((pieces > 0).sum())]
        self._groups = pack_pieces(np.bincount(pieces), length, patch_length)
        self._full_ends = np.cumsum(full_windows(series.lengths, length, stride))
        self._full = int(self._full_ends[-1])
        self._group_ends = self._full + np.cumsum([group.windows for group in self._groups])
        self._count = int(self._group_ends[-1]) if self._groups else self._full

    def __len__(self) -> int:
        return self._count

    def pieces(self, window: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (series, start, stop, offset in the window) of the pieces of a window."""
        if not 0 <= window < self._count:
            raise IndexError(f"window {window} of {self._count}")
        if window < self._full:
            series = int(np.searchsorted(self._full_ends, window, side="right"))
            before = int(self._full_ends[series - 1]) if series else 0
            start = (window - before) * self.stride
            yield series, start, start + self.length, 0
            return
        number = int(np.searchsorted(self._group_ends, window, side="right"))
        group = self._groups[number]
        yield from self._short_pieces(group, window - int(self._group_ends[number]))

    def _short_pieces(self, group: WindowGroup, window: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the pieces of one window of a group; `window` is counted from the group's end."""
        offset = 0
        for run in group.part(group.windows + window, 1).runs:
            for series in self._order[run.first : run.first + run.each].tolist():
                stop = int(self.series.lengths[series])
                yield series, stop - run.length, stop, offset
                offset += footprint(run.length, self.patch_length)

    def _read(self, window: int) -> PackedWindow | None:
        values = np.zeros(self.length, np.float32)
        mask = np.zeros(self.length, np.bool_)
        documents = np.full(self.length, PADDING, np.int32)
        document = 0
        for series, start, stop, offset in self.pieces(window):
            found = self._read_points(series, start, stop)
            if found is None:
                continue
            end = offset + stop - start
            values[offset:end], mask[offset:end] = found
            # The rest of its last token belongs to the piece too.
            documents[offset : offset + footprint(stop - start, self.patch_length)] = document
            document += 1
        return (values, mask, documents) if document else None


def piece_lengths(lengths: NDArray[np.int64], length: int, stride: int) -> NDArray[np.int64]:
    """Return the points of each series' short piece: a whole short series, a tail, or 0."""
    full = full_windows(lengths, length, stride)
    start = full * stride
    seen = np.where(full > 0, start - stride + length, 0)
    pieces = lengths - start
    return np.where((lengths > seen) & (pieces >= MIN_POINTS), pieces, 0)


@dataclass(frozen=True)
class WindowStats:
    """How full the windows over a set of series are."""

    windows: int
    padding: float  # share of the windows' points that belong to no series
    unused: float  # share of the series' points that are in no window

    def __str__(self) -> str:
        return f"windows={self.windows:,} padding={self.padding:.1%} unused={self.unused:.1%}"


def window_stats(
    lengths: NDArray[np.int64], length: int, stride: int, patch_length: int, packed: bool
) -> WindowStats:
    """Return how full `PackedWindows` or `Windows` over series of these lengths would be.

    `length` is in points; points between windows with a larger stride are unused.
    """
    full = full_windows(lengths, length, stride)
    seen = np.where(full > 0, (full - 1) * min(stride, length) + length, 0)
    if packed:
        pieces = piece_lengths(lengths, length, stride)
        overlap = np.where(full > 0, max(0, length - stride), 0)
        groups = pack_pieces(np.bincount(pieces), length, patch_length)
        more = sum(group.windows for group in groups)
    else:
        pieces = np.where((full > 0) | (lengths < MIN_POINTS), 0, lengths)
        overlap = np.zeros_like(pieces)
        more = int((pieces > 0).sum())
    seen = seen + np.where(pieces > 0, pieces - overlap, 0)
    windows = int(full.sum()) + more
    inside = int(full.sum()) * length + int(pieces.sum())
    room, total = windows * length, int(lengths.sum())
    return WindowStats(
        windows, 1 - inside / room if room else 0.0, 1 - int(seen.sum()) / total if total else 0.0
    )


class PieceRun(NamedTuple):
    """`each` pieces of one length in every window of a group; `first` is window 0's first one.

    Pieces are counted from the longest to the shortest.
    """

    first: int
    each: int
    length: int  # points


@dataclass(frozen=True)
class WindowGroup:
    """Windows that were filled the same way, and the free points at the end of each."""

    windows: int
    room: int  # points
    runs: tuple[PieceRun, ...] = ()

    def part(self, start: int, windows: int) -> WindowGroup:
        """Return some of the windows, from number `start` on, as a group of their own."""
        moved = (PieceRun(run.first + start * run.each, run.each, run.length) for run in self.runs)
        return WindowGroup(windows, self.room, tuple(moved))

    def filled(self, run: PieceRun, patch: int) -> WindowGroup:
        """Return the group with the pieces of `run` added."""
        room = self.room - run.each * footprint(run.length, patch)
        return WindowGroup(self.windows, room, (*self.runs, run))


def pack_pieces(counts: NDArray[np.int64], window: int, patch: int) -> list[WindowGroup]:
    """Return the groups of windows that hold `counts[n]` pieces of n points, for every n.

    A piece begins at a multiple of `patch`; only the last one may use a point beyond the last
    whole token, where a window has one more point than its tokens.
    """
    groups, first = _GroupsByRoom(), 0
    for length in range(len(counts) - 1, 0, -1):
        left = int(counts[length])
        while left:
            group = groups.tightest(length) or WindowGroup(left, window)
            each = min(left, (group.room - length) // footprint(length, patch) + 1)
            windows = min(group.windows, left // each)
            groups.add(group.part(0, windows).filled(PieceRun(first, each, length), patch))
            if group.runs and windows < group.windows:
                groups.add(group.part(windows, group.windows - windows))
            first, left = first + windows * each, left - windows * each
    return groups.fullest_first()


def footprint(length: int, patch: int) -> int:
    """Return the points that a piece takes up: whole tokens, since the next piece begins one."""
    return -(-length // patch) * patch


class _GroupsByRoom:
    """Groups by the room they have left."""

    def __init__(self) -> None:
        self._rooms: list[int] = []  # ascending
        self._groups: dict[int, deque[WindowGroup]] = {}

    def add(self, group: WindowGroup) -> None:
        """File a group under its room."""
        if group.room not in self._groups:
            insort(self._rooms, group.room)
            self._groups[group.room] = deque()
        self._groups[group.room].append(group)

    def tightest(self, length: int) -> WindowGroup | None:
        """Take out the group with the least room in which `length` points fit."""
        index = bisect_left(self._rooms, length)
        if index == len(self._rooms):
            return None
        room = self._rooms[index]
        group = self._groups[room].popleft()
        if not self._groups[room]:
            del self._groups[room], self._rooms[index]
        return group

    def fullest_first(self) -> list[WindowGroup]:
        """Return all groups, the fullest first."""
        return [group for room in self._rooms for group in self._groups[room]]
