"""Series that were read whole into memory, end to end in one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from steplab.data.points import check_range
from steplab.errors import UserError


class PackedSeries:
    """A SeriesSet over arrays in memory; 4 bytes per point and 16 per series."""

    def __init__(self, name: str, series: Sequence[NDArray[np.float32]]) -> None:
        if not series:
            raise UserError(f"{name} holds no series.")
        self.name = name
        self.lengths = np.fromiter(map(len, series), np.int64, len(series))
        self._ends = np.cumsum(self.lengths)
        self._points = np.concatenate(series).astype(np.float32, copy=False)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return a copy of points [start, stop) of series `index`."""
        check_range(self.lengths, index, start, stop)
        first = int(self._ends[index] - self.lengths[index])
        return self._points[first + start : first + stop].copy()
