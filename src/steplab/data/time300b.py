"""Time-300B folders: meta.json beside data-<k>-of-<n>.bin files of raw little-endian numbers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steplab.data.mapped import MappedFile
from steplab.data.points import check_range, to_float32
from steplab.data.series_writer import PART_ELEMENTS, SeriesWriter
from steplab.data.time300b_meta import META, PART, read_meta
from steplab.errors import UserError

__all__ = ["META", "PART", "Time300B", "write_time300b"]


class Time300B:
    """One dataset, memory-mapped. A series may begin in one file and end in a later one.

    Series that were stored scaled (with a mean and std in meta.json) are read in their own units.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        meta = read_meta(folder / META)
        self.lengths = meta.lengths
        self._offsets, self._means, self._stds = meta.offsets, meta.means, meta.stds
        self._files = [_map_part(folder / name, meta.dtype, count) for name, count in meta.parts]
        self._ends = np.cumsum([count for _, count in meta.parts])

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return points [start, stop) of series `index`; only their pages are read."""
        check_range(self.lengths, index, start, stop)
        first = int(self._offsets[index]) + start
        points = self._slice(first, first + stop - start)
        if self._means is None or self._stds is None:
            return to_float32(points)
        return to_float32(points.astype(np.float64) * self._stds[index] + self._means[index])

    def _slice(self, first: int, last: int) -> NDArray[Any]:
        if first == last:
            return np.empty(0, np.float32)
        part = int(np.searchsorted(self._ends, first, side="right"))
        pieces = []
        while first < last:
            begin, end = int(self._ends[part - 1]) if part else 0, int(self._ends[part])
            pieces.append(self._files[part].slice(first - begin, min(last, end) - begin))
            first, part = end, part + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _map_part(path: Path, dtype: np.dtype[Any], count: int) -> MappedFile:
    if not path.is_file():
        raise UserError(f"{path} is missing, and {META} lists it.", "Download the dataset again.")
    mapped = MappedFile(path, dtype, count)
    size, said = path.stat().st_size, count * dtype.itemsize
    if size != said:
        raise UserError(
            f"{path} has {size:,} bytes, but {count:,} elements of {dtype.name} are {said:,}.",
            f"The dtype or the count in {META} is wrong.",
        )
    return mapped


def write_time300b(
    folder: Path, series: Iterable[ArrayLike], max_elements_per_file: int = PART_ELEMENTS
) -> None:
    """Write 1-D arrays as a Time-300B folder of float32, cut into files of a given size."""
    if max_elements_per_file < 1:
        raise UserError(f"max_elements_per_file is {max_elements_per_file}; it must be at least 1.")
    with SeriesWriter(folder, max_elements_per_file) as writer:
        for number, item in enumerate(series):
            points = np.asarray(item, np.float32)
            if points.ndim != 1:
                raise UserError(f"Series {number} has {points.ndim} dimensions, not 1.")
            writer.append(points)
            writer.end_series()
    if not len(writer.lengths):
        raise UserError(f"There is no series to write to {folder}.")
