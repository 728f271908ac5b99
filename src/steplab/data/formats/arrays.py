"""Series as numpy arrays: .npy memory-mapped, .npz in memory; a 2-D array is one series per row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from steplab.core.errors import SteplabError, UserError
from steplab.core.input_file import BoundedZip, check_memory, open_input
from steplab.data.mapped_file import MappedFile
from steplab.data.series import InMemorySeries, check_range, to_float32

NUMBER_KINDS = "fiu"
PICKLED = "holds an object array: a pickle, which can run any code when opened, so it is refused."
SAVE_INSTEAD = "Save arrays of numbers; series of different lengths as one array each in a .npz."


class ArraySeries:
    """The rows of one mapped .npy file."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        shape, self._fortran, dtype, offset = _read_header(path)
        _check_array(str(path), shape, dtype)
        self._shape = shape if len(shape) == 2 else (1, shape[0])
        rows, points = self._shape
        self._file = MappedFile(path, dtype, rows * points, offset)
        self.lengths = np.full(rows, points, np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return points [start, stop) of row `index`."""
        check_range(self.lengths, index, start, stop)
        rows, points = self._shape
        if self._fortran:
            return to_float32(self._file.points()[index::rows][start:stop])
        first = index * points
        return to_float32(self._file.slice(first + start, first + stop))


def read_npz(path: Path) -> InMemorySeries:
    """Read all arrays of a .npz file, in the order in which they were saved."""
    series: list[NDArray[np.float32]] = []
    try:
        with open_npz(path) as archive:
            for key in archive.files:
                array = np.asarray(archive[key])
                _check_array(f"{path}, array {key!r}", array.shape, array.dtype)
                series.extend(to_float32(row) for row in np.atleast_2d(array))
    except SteplabError:
        raise
    except Exception as error:  # a damaged archive fails in many ways inside zipfile and numpy
        if "Object arrays" in str(error):
            raise UserError(f"{path} {PICKLED}", SAVE_INSTEAD) from None
        raise _unreadable(path, error) from error
    return InMemorySeries(str(path), series)


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    """Open a .npz file if its arrays, and the same as float32, fit into the memory limit."""
    with open_input(path) as file:
        source: Any = BoundedZip(file, str(path))
        with np.load(source, allow_pickle=False) as archive:
            check_memory(2 * sum(info.file_size for info in archive.zip.infolist()), path)
            yield archive


def _read_header(path: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return (shape, Fortran order, dtype, bytes before the first element)."""
    try:
        with open_input(path) as file:
            return (*_parse_header(file), file.tell())
    except (OSError, SteplabError):
        raise
    except Exception as error:  # the header is Python text; a damaged one fails in many ways
        raise _unreadable(path, error) from error


def _parse_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    if version == (1, 0):
        return npy.read_array_header_1_0(file)
    if version == (2, 0):
        return npy.read_array_header_2_0(file)
    raise ValueError(f"version {version[0]}.{version[1]} of the format does not hold plain numbers")


def _check_array(where: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise UserError(f"{where} {PICKLED}", SAVE_INSTEAD)
    if dtype.kind not in NUMBER_KINDS:
        raise UserError(f"{where} holds {dtype}, not real numbers.")
    if min(shape, default=0) < 0:
        raise UserError(f"{where} has the shape {shape}.", "Save it again with numpy.")
    if len(shape) not in (1, 2):
        raise UserError(f"{where} has {len(shape)} dimensions.", "Give 1 (one series) or 2 (rows).")
    if 0 in shape:
        raise UserError(f"{where} has no points (its shape is {shape}).")


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
    return UserError(f"{path} is not a valid {path.suffix} file: {reason}.")


FORMAT = {".npy": ArraySeries, ".npz": read_npz}
