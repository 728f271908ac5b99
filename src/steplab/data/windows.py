"""Windows of equal length over a set of series, found by arithmetic instead of a list."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import SteplabError, UserError
from steplab.data.normalization import MIN_FINITE, NormalizeMode, Normalizer
from steplab.data.series import SeriesSet, Source, read_error

Window = tuple[NDArray[np.float32], NDArray[np.bool_]]
AnyWindow = TypeVar("AnyWindow", bound=tuple[NDArray[Any], ...])
MIN_POINTS = 2  # one to read, one to predict


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
