"""Windows of equal length over a set of series, found by arithmetic and not by a list."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from steplab.data.normalise import LEAST_FINITE, Normalise, Normaliser
from steplab.errors import SteplabError, UserError

if TYPE_CHECKING:
    from steplab.data.series import SeriesSet

Window = tuple[NDArray[np.float32], NDArray[np.bool_]]
LEAST_POINTS = 2  # one to see, one to predict


class Windows:
    """Windows of `length` points every `stride` points, `len(windows)` in all.

    The first window of a series is always kept, padded with 0 on the right; later ones only while
    a full window fits. Series with fewer than 2 points have no window. 8 bytes per series.

    Whether points are finite is known only when they are read, and a set can be larger than the
    memory. So a window with fewer than 2 finite points keeps its number, and `read` gives another
    one in its place: it walks over all windows by a step of about 0.618 of their number, so that
    a block of bad ones is replaced by many different good ones. The choice depends on the number
    and the data alone.
    """

    def __init__(
        self, series: SeriesSet, length: int, stride: int, normalise: Normalise = "series"
    ) -> None:
        if length < LEAST_POINTS or stride < 1:
            raise UserError(
                f"Windows of {length} points every {stride} points are not possible.",
                f"The length must be at least {LEAST_POINTS}, the stride at least 1.",
            )
        self.series, self.length, self.stride = series, length, stride
        self._normaliser = Normaliser(series, normalise)
        lengths = series.lengths
        counts = np.where(lengths >= length, 1 + (lengths - length) // stride, 1)
        counts[lengths < LEAST_POINTS] = 0
        self._too_short = int((counts == 0).sum())
        self._ends = np.cumsum(counts)
        self._count = int(self._ends[-1]) if len(counts) else 0
        if not self._count:
            raise UserError(
                f"{series.name} has no series with {LEAST_POINTS} points "
                f"({self._too_short:,} series are shorter)."
            )
        self._step = _spread_step(self._count)

    def __len__(self) -> int:
        return self._count

    @property
    def skipped(self) -> dict[str, int]:
        """Series left out by reason; NaN series count from the moment they are first touched."""
        return {
            f"fewer than {LEAST_POINTS} points": self._too_short,
            f"fewer than {LEAST_FINITE} finite points": self._normaliser.unusable,
        }

    def locate(self, window: int) -> tuple[int, int]:
        """Return (series, start) of a window by its number."""
        if not 0 <= window < self._count:
            raise IndexError(f"window {window} of {self._count}")
        series = int(np.searchsorted(self._ends, window, side="right"))
        before = int(self._ends[series - 1]) if series else 0
        return series, (window - before) * self.stride

    def read(self, window: int) -> Window:
        """Return (values, mask), both of shape [length].

        The mask is False on padding and on NaN or Inf points; values are 0 there.
        """
        series, start = self.locate(window)
        for turn in range(1, self._count + 1):
            found = self._read_from(series, start)
            if found is not None:
                return found
            series, start = self.locate((window + turn * self._step) % self._count)
        raise UserError(
            f"{self.series.name} has no window with {LEAST_FINITE} finite points "
            f"({self._count:,} windows were read)."
        )

    def _read_from(self, series: int, start: int) -> Window | None:
        """Read one window, or None where fewer than 2 points are finite."""
        try:
            if not self._normaliser.usable(series):
                return None
            stop = min(start + self.length, int(self.series.lengths[series]))
            points = self.series.read(series, start, stop)
            finite = np.isfinite(points)
            whole = bool(finite.all())
            if not whole and finite.sum() < LEAST_FINITE:
                return None
            points = self._normaliser.apply(series, points)
            values = np.zeros(self.length, np.float32)
            values[: stop - start] = points if whole else np.where(finite, points, 0)
            mask = np.zeros(self.length, np.bool_)
            mask[: stop - start] = finite
            return values, mask
        except SteplabError:
            raise
        except Exception as error:  # whatever a reader raises is told with its place
            raise UserError(
                f"{self.series.name}: series {series} cannot be read from point {start}: "
                f"{error or type(error).__name__}."
            ) from error


def _spread_step(count: int) -> int:
    """Return a step near the golden section of `count` that visits all before it repeats."""
    step = max(1, round(count * 0.618034))
    while math.gcd(step, count) != 1:
        step += 1
    return step
