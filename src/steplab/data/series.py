"""A set of series: what every format reads into, kept in memory or joined from several sets.

`SeriesSet` is the protocol; steplab.data.formats opens files as such sets.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import SteplabError, UserError

CHUNK_POINTS = 2**18  # points per read: 1 MiB of float32
FINGERPRINT_SERIES, FINGERPRINT_POINTS = 16, 64  # sampled: 16 reads, however large the set is


class Source(Protocol):
    """Something that windows are cut from: series of points, or files of bytes."""

    @property
    def name(self) -> str:
        """What messages call it: its path, if it has one."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Points per series, shape [series]."""
        ...

    def __len__(self) -> int:
        """How many series there are."""
        ...

    def read(self, index: int, start: int, stop: int) -> NDArray[Any]:
        """Return points [start, stop) of series `index`, shape [stop - start].

        Must not read the rest of the series if the format allows it.
        """
        ...


class SeriesSet(Source, Protocol):
    """Many series of one channel each, read by windows."""

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return points [start, stop) of series `index`, in its own units."""
        ...


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


def check_range(lengths: NDArray[np.int64], index: int, start: int, stop: int) -> None:
    """Raise an IndexError unless [start, stop) lies inside series `index`.

    A wrong range is a bug in the caller, which a slice would hide by returning fewer points.
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


def chunks(
    series: SeriesSet, index: int, size: int = CHUNK_POINTS
) -> Iterator[NDArray[np.float32]]:
    """Yield the points of series `index` in order, at most `size` at a time."""
    length = int(series.lengths[index])
    for start in range(0, length, size):
        try:
            yield series.read(index, start, min(start + size, length))
        except SteplabError:
            raise
        except Exception as error:  # formats and users' own sets raise anything
            raise read_error(series, index, start, error) from error


def read_error(series: Source, index: int, start: int, error: Exception) -> UserError:
    """Return the error of a set that fails while it is read, with the series and the point."""
    return UserError(
        f"{series.name}: series {index} cannot be read from point {start}: "
        f"{error or type(error).__name__}."
    )


def fingerprint(series: Source) -> str:
    """Return a short text that changes with the number, the lengths or sampled points of a set."""
    check = zlib.crc32(np.ascontiguousarray(series.lengths).tobytes())
    count = min(FINGERPRINT_SERIES, len(series))
    for index in np.linspace(0, len(series) - 1, count).astype(int).tolist():
        length = int(series.lengths[index])
        start = max(0, (length - FINGERPRINT_POINTS) // 2)
        points = series.read(index, start, min(length, start + FINGERPRINT_POINTS))
        check = zlib.crc32(points.tobytes(), check)
    return f"{len(series)} series, {check:08x}"


def notes(series: Source) -> list[str]:
    """Return what a user should know about a set: columns left out, gaps in time."""
    found = list(getattr(series, "notes", ()))
    for member in getattr(series, "members", ()):
        found += notes(member)
    return found
