"""Normalization of every series by its own statistics.

series  (x - mean) / std over the whole series (ddof 0); a constant series becomes x - mean = 0
max     x / max |x|; a series of zeros stays zero
none    x
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError, did_you_mean
from steplab.data.series import CHUNK_POINTS, SeriesSet, chunks

NormalizeMode = Literal["series", "max", "none"]
MIN_FINITE = 2  # a series with fewer has nothing to predict


class Statistics(NamedTuple):
    """Statistics of the finite points of one series, in float64."""

    finite: int
    mean: float
    squares: float  # sum of (x - mean) ** 2
    low: float
    high: float


class Normalizer:
    """Scales windows of a set; reads a whole series once, when its first window is asked for.

    Two float64 per series are kept. Two threads that meet at one series compute the same numbers;
    the center is written last, because it marks the pair as known.
    """

    def __init__(self, series: SeriesSet, mode: NormalizeMode) -> None:
        if mode not in get_args(NormalizeMode):
            raise UserError(
                f"normalize is {mode!r}.", did_you_mean(str(mode), get_args(NormalizeMode))
            )
        self.mode = mode
        self._series = series
        known = len(series) if mode != "none" else 0
        self._center = np.full(known, np.nan)  # NaN: not read yet
        self._scale = np.ones(known)  # 0: too few finite points

    def usable(self, index: int) -> bool:
        """Whether series `index` has two finite points; "none" does not look and says yes."""
        return self.mode == "none" or self._pair(index)[1] > 0

    @property
    def unusable(self) -> int:
        """How many of the series read so far have fewer than two finite points."""
        return int((self._scale == 0).sum())

    def apply(self, index: int, points: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the window `points` of series `index` scaled, same shape; NaN and Inf stay."""
        if self.mode == "none":
            return points
        center, scale = self._pair(index)
        return ((points.astype(np.float64) - center) / scale).astype(np.float32)

    def _pair(self, index: int) -> tuple[float, float]:
        if np.isnan(self._center[index]):
            center, scale = self._compute(index)
            self._scale[index] = scale
            self._center[index] = center
        return float(self._center[index]), float(self._scale[index])

    def _compute(self, index: int) -> tuple[float, float]:
        found = statistics(self._series, index)
        if found.finite < MIN_FINITE:
            return 0.0, 0.0
        if self.mode == "max":
            return 0.0, max(abs(found.low), abs(found.high)) or 1.0
        if found.low == found.high:  # exactly equal: the rounded mean would leave a tiny, wrong std
            return found.low, 1.0
        return found.mean, float(np.sqrt(found.squares / found.finite))


def statistics(series: SeriesSet, index: int, chunk: int = CHUNK_POINTS) -> Statistics:
    """Read series `index` in chunks and merge their moments (Chan et al.), which is stable."""
    finite, mean, squares, low, high = 0, 0.0, 0.0, np.inf, -np.inf
    for points in chunks(series, index, chunk):
        is_finite = np.isfinite(points)
        if not is_finite.all():
            points = points[is_finite]
            if not len(points):
                continue
        low, high = min(low, float(points.min())), max(high, float(points.max()))
        away_from_mean = points.astype(np.float64)
        chunk_mean = float(away_from_mean.mean())
        away_from_mean -= chunk_mean
        total, away = finite + len(points), chunk_mean - mean
        squares += float(np.square(away_from_mean, out=away_from_mean).sum())
        squares += away**2 * finite * len(points) / total
        mean += away * len(points) / total
        finite = total
    return Statistics(finite, mean, squares, low, high)
