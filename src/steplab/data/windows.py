"""Windows of equal length over a set of series, found by arithmetic instead of a list.

Every series is normalized by its own statistics:

series  (x - mean) / std over the whole series (ddof 0); a constant series becomes x - mean = 0
max     x / max |x|; a series of zeros stays zero
none    x
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import SteplabError, UserError, did_you_mean
from steplab.data.series import CHUNK_POINTS, SeriesSet, Source, chunks, read_error

NormalizeMode = Literal["series", "max", "none"]
Window = tuple[NDArray[np.float32], NDArray[np.bool_]]
AnyWindow = TypeVar("AnyWindow", bound=tuple[NDArray[Any], ...])
MIN_POINTS = 2  # one to read, one to predict
MIN_FINITE = 2  # a series with fewer has nothing to predict


class WindowSet(Protocol):
    """Numbered windows, as a Loader reads them."""

    @property
    def series(self) -> Source:
        """Where the points come from."""
        ...

    @property
    def length(self) -> int:
        """Points per window."""
        ...

    @property
    def skipped(self) -> dict[str, int]:
        """Series left out, by reason."""
        ...

    def __len__(self) -> int:
        """How many windows there are."""
        ...

    def read(self, window: int) -> tuple[NDArray[Any], ...]:
        """Return (values, mask), or (values, mask, documents), each of shape [length]."""
        ...


class SeriesWindows(ABC, Generic[AnyWindow]):
    """Windows of `length` points every `stride` points, `len(windows)` in all.

    Series with fewer than 2 points have no window.

    Whether points are finite is known only after reading them, and a set can be larger than
    memory. So a window with fewer than 2 finite points keeps its number, and `read` returns another
    one in its place (`substitutes`). The choice depends on the number and the data alone.
    """

    def __init__(
        self, series: SeriesSet, length: int, stride: int, normalize: NormalizeMode
    ) -> None:
        check_window(length, stride)
        self.series, self.length, self.stride = series, length, stride
        self._normalizer = Normalizer(series, normalize)
        self._too_short = int((series.lengths < MIN_POINTS).sum())
        if self._too_short == len(series):
            raise UserError(
                f"{series.name} has no series with {MIN_POINTS} points "
                f"({len(series):,} series are shorter)."
            )

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, window: int) -> AnyWindow | None:
        """Return a window, or None if it has fewer than 2 finite points."""

    @property
    def skipped(self) -> dict[str, int]:
        """Series left out by reason; an all-NaN series counts from its first read on."""
        return {
            f"fewer than {MIN_POINTS} points": self._too_short,
            f"fewer than {MIN_FINITE} finite points": self._normalizer.unusable,
        }

    def read(self, window: int) -> AnyWindow:
        """Return a window, all arrays of shape [length].

        The mask is False on padding and on NaN or Inf points; values are 0 there.
        """
        for number in substitutes(window, len(self)):
            found = self._read(number)
            if found is not None:
                return found
        raise UserError(
            f"{self.series.name} has no window with {MIN_FINITE} finite points "
            f"({len(self):,} windows were read)."
        )

    def _read_points(self, series: int, start: int, stop: int) -> Window | None:
        """Return (normalized values, finite) of points [start, stop), 0 where not finite.

        None if fewer than 2 points are finite, here or in the whole series.
        """
        try:
            if not self._normalizer.usable(series):
                return None
            points = self.series.read(series, start, stop)
            finite = np.isfinite(points)
            whole = bool(finite.all())
            if not whole and finite.sum() < MIN_FINITE:
                return None
            points = self._normalizer.apply(series, points)
            return points if whole else np.where(finite, points, np.float32(0)), finite
        except SteplabError:
            raise
        except Exception as error:  # formats and users' own sets raise anything
            raise read_error(self.series, series, start, error) from error


class Windows(SeriesWindows[Window]):
    """Windows (values, mask), each of one series; 8 bytes per series.

    The first window of a series is always kept, padded with 0 on the right; later ones only while
    a full window fits.
    """

    def __init__(
        self, series: SeriesSet, length: int, stride: int, normalize: NormalizeMode = "series"
    ) -> None:
        super().__init__(series, length, stride, normalize)
        lengths = series.lengths
        counts = np.maximum(full_windows(lengths, length, stride), lengths >= MIN_POINTS)
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, window: int) -> tuple[int, int]:
        """Return (series, start) of a window by its number."""
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        series = int(np.searchsorted(self._ends, window, side="right"))
        before = int(self._ends[series - 1]) if series else 0
        return series, (window - before) * self.stride

    def _read(self, window: int) -> Window | None:
        series, start = self.locate(window)
        stop = min(start + self.length, int(self.series.lengths[series]))
        found = self._read_points(series, start, stop)
        if found is None:
            return None
        values = np.zeros(self.length, np.float32)
        mask = np.zeros(self.length, np.bool_)
        values[: stop - start], mask[: stop - start] = found
        return values, mask


def full_windows(lengths: NDArray[np.int64], length: int, stride: int) -> NDArray[np.int64]:
    """Return how many whole windows fit into each series."""
    return np.where(lengths >= length, 1 + (lengths - length) // stride, 0)


def check_window(length: int, stride: int) -> None:
    """Refuse windows without a target and strides below 1."""
    if length < MIN_POINTS or stride < 1:
        raise UserError(
            f"Windows of {length} points every {stride} points are not possible.",
            f"The length must be at least {MIN_POINTS}, the stride at least 1.",
        )


def substitutes(window: int, count: int) -> Iterator[int]:
    """Yield a window, then all others, each once, to be read in its place.

    The stride is about 0.618 of their number, so that a block of bad windows is replaced by many
    different good ones.
    """
    if not 0 <= window < count:
        raise IndexError(f"window {window} of {count}")
    yield window
    stride = _golden_stride(count)
    yield from ((window + turn * stride) % count for turn in range(1, count))


def _golden_stride(count: int) -> int:
    """Return a stride near 0.618 `count` that visits all windows before it repeats one."""
    stride = max(1, round(count * 0.618034))
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride


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


class Statistics(NamedTuple):
    """Statistics of the finite points of one series, in float64."""

    finite: int
    mean: float
    squares: float  # sum of (x - mean) ** 2
    low: float
    high: float


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
