"""Sets of series in memory, and sets that join others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError


def check_range(lengths: NDArray[np.int64], index: int, start: int, stop: int) -> None:
    """Raise an IndexError unless [start, stop) lies inside series `index`.

    A wrong range is a fault of the calling code. A slice would hide it by returning fewer points.
    """
    if not 0 <= index < len(lengths):
        raise IndexError(f"series {index} of {len(lengths)}")
    if not 0 <= start <= stop <= lengths[index]:
        raise IndexError(f"points {start} to {stop} of series {index} with {lengths[index]} points")


def to_float32(points: NDArray[Any]) -> NDArray[np.float32]:
    """Copy points as float32. A value above 3.4e38 becomes Inf, which windows mask."""
    if points.dtype.itemsize <= 4:
        return points.astype(np.float32)
    with np.errstate(over="ignore"):
        return points.astype(np.float32)


class InMemorySeries:
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


if TYPE_CHECKING:
    from steplab.data.series import SeriesSet


class JoinedSeries:
    """The series of `members`, one member after the other."""

    def __init__(self, name: str, members: Sequence[SeriesSet]) -> None:
        self.name = name
        self.members = tuple(members)
        self.lengths = np.concatenate([member.lengths for member in members])
        self._ends = np.cumsum([len(member) for member in members])

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return points [start, stop) of series `index`, counted over all members."""
        if not 0 <= index < len(self.lengths):
            raise IndexError(f"series {index} of {len(self.lengths)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        member = self.members[which]
        return member.read(index - int(self._ends[which]) + len(member), start, stop)
