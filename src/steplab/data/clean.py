"""Cleaning: cut out of series what is not finite, flat, or too short.

1. A series is split at NaN and Inf into runs.
2. A run is divided into windows from its beginning; the last one may be shorter. A window is flat
   if more than a given share of its first or second differences is zero: a line that stays
   constant or climbs by the same step. Flat windows are dropped, windows that stay are joined.
3. Whatever is then shorter than a given length is dropped too.

Points are read and written in chunks. Cleaning twice gives the same as cleaning once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError
from steplab.data.formats.time300b import SeriesWriter
from steplab.data.series import CHUNK_POINTS, SeriesSet, chunks

NOT_FINITE, FLAT, TOO_SHORT = "NaN or Inf", "flat", "too short"
REASONS = (NOT_FINITE, FLAT, TOO_SHORT)


@dataclass(frozen=True)
class CleaningRule:
    """What is kept. Window and share are those that the Time-300B paper describes."""

    window: int = 128  # points
    most_zeros: float = 0.2  # share of a window's first or second differences
    shortest: int = 16  # points

    def __post_init__(self) -> None:
        if self.window < 3:
            raise UserError(f"A window of {self.window} points has no second differences.")
        if not 0 <= self.most_zeros <= 1:
            raise UserError(f"The share of zeros is {self.most_zeros}, not between 0 and 1.")
        if self.shortest < 1:
            raise UserError(f"The shortest run has {self.shortest} points, fewer than 1.")


@dataclass
class CleaningCounts:
    """What happened to the points and series that were read."""

    series: int = 0
    points: int = 0
    kept_series: int = 0  # runs written: a series can become several, or none
    kept_points: int = 0
    lost_series: int = 0  # with nothing left
    dropped_points: Counter[str] = field(default_factory=Counter)  # by reason
    dropped_from: Counter[str] = field(default_factory=Counter)  # series that lost some, by reason


def clean(
    series: SeriesSet,
    rule: CleaningRule,
    writer: SeriesWriter,
    advance: Callable[[int], None] = lambda points: None,
    chunk: int = CHUNK_POINTS,
) -> CleaningCounts:
    """Write the good parts of every series; `advance` is called with the points of each read."""
    counts = CleaningCounts()
    for index in range(len(series)):
        cleaner = _Cleaner(rule, writer)
        for points in chunks(series, index, chunk):
            cleaner.feed(points)
            counts.points += len(points)
            advance(len(points))
        cleaner.end_of_run()
        counts.series += 1
        counts.kept_series += cleaner.runs
        counts.kept_points += cleaner.kept
        counts.lost_series += cleaner.runs == 0
        counts.dropped_points.update(cleaner.dropped)
        counts.dropped_from.update(cleaner.dropped.keys())
    return counts


class _Cleaner:
    """Cleans one series; holds no more than a chunk, a window and a short run."""

    def __init__(self, rule: CleaningRule, writer: SeriesWriter) -> None:
        self.rule, self.writer = rule, writer
        self.runs, self.kept = 0, 0
        self.dropped: Counter[str] = Counter()
        self._rest = np.empty(0, np.float32)  # end of the finite run, less than a window
        self._pending: list[NDArray[np.float32]] = []  # good, but not yet long enough to be kept
        self._length = 0  # points of the good stretch so far

    def feed(self, points: NDArray[np.float32]) -> None:
        """Take the next points of the series."""
        for begin, end, finite in stretches(np.isfinite(points)):
            if finite:
                self._extend(points[begin:end])
            else:
                self.end_of_run()
                self.dropped[NOT_FINITE] += end - begin

    def end_of_run(self) -> None:
        """Judge the last, shorter window of a run and close the run."""
        if len(self._rest):
            self._judge(self._rest[None])
            self._rest = self._rest[:0]
        self._end_of_stretch()

    def _extend(self, points: NDArray[np.float32]) -> None:
        points = np.concatenate([self._rest, points])
        window = self.rule.window
        whole = len(points) // window * window
        if whole:
            self._judge(points[:whole].reshape(-1, window))
        self._rest = points[whole:]

    def _judge(self, windows_NW: NDArray[np.float32]) -> None:
        """Keep or drop consecutive windows [windows, points]."""
        for begin, end, flat in stretches(is_flat(windows_NW, self.rule.most_zeros)):
            points = windows_NW[begin:end].ravel()
            if flat:
                self._end_of_stretch()
                self.dropped[FLAT] += len(points)
            else:
                self._keep(points)

    def _keep(self, points: NDArray[np.float32]) -> None:
        self._pending.append(points)
        self._length += len(points)
        if self._length >= self.rule.shortest:
            for piece in self._pending:
                self.writer.append(piece)
                self.kept += len(piece)
            self._pending = []

    def _end_of_stretch(self) -> None:
        if self._length >= self.rule.shortest:
            self.writer.end_series()
            self.runs += 1
        elif self._length:
            self.dropped[TOO_SHORT] += self._length
        self._pending, self._length = [], 0


def is_flat(windows_NW: NDArray[np.float32], most_zeros: float) -> NDArray[np.bool_]:
    """Return which windows [windows, points] have too many differences of zero.

    In float64 the difference of two float32 is exact unless one is 2^29 times the other.
    """
    first = np.diff(windows_NW.astype(np.float64), axis=1)
    second = np.diff(first, axis=1)
    return (_zeros(first) > most_zeros) | (_zeros(second) > most_zeros)


def _zeros(differences_ND: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of zeros in every row; 0 without any difference."""
    return (differences_ND == 0).sum(1) / max(differences_ND.shape[1], 1)


def stretches(marks: NDArray[np.bool_]) -> Iterator[tuple[int, int, bool]]:
    """Yield (begin, end, mark) of the longest stretches of equal marks."""
    if not len(marks):
        return
    edges = np.flatnonzero(marks[1:] != marks[:-1]) + 1
    begin = 0
    for end in [*edges.tolist(), len(marks)]:
        yield begin, end, bool(marks[begin])
        begin = end
