"""Time-300B folders: meta.json beside data-<k>-of-<n>.bin files of raw little-endian numbers.

Read by `Time300B`; written by `SeriesWriter`, `write_time300b` and `pack_sets`.
"""

from __future__ import annotations

import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steplab.core.errors import MeasurementError, UserError, did_you_mean
from steplab.core.input_file import parse_json, read_input
from steplab.data.mapped_file import MappedFile
from steplab.data.series import SeriesSet, check_range, chunks, to_float32

META = "meta.json"
PART = re.compile(r"data-(\d+)-of-(\d+)\.bin")
FLOATS = ("float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS)
PART_ELEMENTS = 2**30  # 4.29 GB of float32, the file size of the published set


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
    size, expected = path.stat().st_size, count * dtype.itemsize
    if size != expected:
        raise UserError(
            f"{path} has {size:,} bytes, but {count:,} elements of {dtype.name} are {expected:,}.",
            f"The dtype or the count in {META} is wrong.",
        )
    return mapped


class SeriesWriter:
    """Writes float32 series to a new Time-300B folder; 8 bytes per series are held in memory.

    Files get their names, and the folder its meta.json, at the end of the `with`: a folder that
    opens is complete. After an error nothing is left behind.
    """

    def __init__(self, folder: Path, part_elements: int = PART_ELEMENTS) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is not an empty folder.", "Give a new one.")
        self.folder, self.part_elements = folder, part_elements
        self.lengths = array("q")
        self.checksum = 0  # of all points, in their order
        self._open_length = 0
        self._counts: list[int] = []
        self._file: BinaryIO | None = None

    def append(self, points: NDArray[np.float32]) -> None:
        """Add points to the series that is being written."""
        data = points.astype("<f4", copy=False)
        self.checksum = zlib.crc32(data.tobytes(), self.checksum)
        self._open_length += len(data)
        while len(data):
            if self._file is None or self._counts[-1] == self.part_elements:
                self._next_part()
            assert self._file is not None
            piece = data[: self.part_elements - self._counts[-1]]
            self._file.write(piece.tobytes())
            self._counts[-1] += len(piece)
            data = data[len(piece) :]

    def end_series(self) -> None:
        """End the series; points appended from now on belong to the next one."""
        self.lengths.append(self._open_length)
        self._open_length = 0

    def __enter__(self) -> SeriesWriter:
        self._made_folder = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if self._file is not None:
                self._file.close()
            if kind is None and len(self.lengths):
                self._name_files()
                return
        except BaseException:  # a full disk may show only when the last bytes are flushed
            self._remove_files()
            raise
        self._remove_files()

    def _next_part(self) -> None:
        if self._file is not None:
            self._file.close()
        self._counts.append(0)
        self._file = self._unnamed(len(self._counts)).open("wb")

    def _unnamed(self, number: int) -> Path:
        return self.folder / f"part-{number}.unfinished"

    def _name_files(self) -> None:
        if not self._counts:  # series without a point
            self._next_part()
            assert self._file is not None
            self._file.close()
        names = [f"data-{k}-of-{len(self._counts)}.bin" for k in range(1, len(self._counts) + 1)]
        for number, name in enumerate(names, 1):
            self._unnamed(number).rename(self.folder / name)
        draft = self.folder / f"{META}.unfinished"
        with draft.open("w", encoding="utf-8") as file:
            self._write_meta(file, dict(zip(names, self._counts, strict=True)))
        draft.rename(self.folder / META)

    def _write_meta(self, file: TextIO, files: dict[str, int]) -> None:
        """Write one series after the other: as one object, a million of them would take 300 MB."""
        listed = ", ".join(f'"{name}": {count}' for name, count in files.items())
        file.write(f'{{"num_sequences": {len(self.lengths)}, "dtype": "float32", ')
        file.write(f'"files": {{{listed}}}, "scales": [')
        offset = 0
        for number, length in enumerate(self.lengths):
            comma = ",\n" if number else ""
            file.write(f'{comma}{{"offset": {offset}, "length": {length}}}')
            offset += length
        file.write("]}\n")

    def _remove_files(self) -> None:
        for path in self.folder.iterdir():  # it was empty
            path.unlink()
        if self._made_folder:
            self.folder.rmdir()


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


@dataclass(frozen=True)
class Packed:
    """What a folder holds after packing."""

    series: int
    points: int


def pack_sets(
    sets: Sequence[SeriesSet],
    folder: Path,
    advance: Callable[[int], None] = lambda points: None,
    part_elements: int = PART_ELEMENTS,
) -> Packed:
    """Write all series of all sets in order; `advance` is called with the points of each write."""
    with SeriesWriter(folder, part_elements) as writer:
        for series in sets:
            for index in range(len(series)):
                for points in chunks(series, index):
                    writer.append(points)
                    advance(len(points))
                writer.end_series()
    if not len(writer.lengths):
        raise UserError(f"There is no series to write to {folder}.")
    verify(writer)
    return Packed(len(writer.lengths), sum(writer.lengths))


def verify(writer: SeriesWriter) -> None:
    """Read a written folder back and compare every length and every bit."""
    found = Time300B(writer.folder)
    checksum = 0
    for index in range(len(found)):
        for points in chunks(found, index):
            checksum = zlib.crc32(points.astype("<f4", copy=False).tobytes(), checksum)
    if checksum != writer.checksum or found.lengths.tolist() != list(writer.lengths):
        raise MeasurementError(
            f"{writer.folder} does not read back as it was written.",
            "Check the disk, and write it again.",
        )


@dataclass(frozen=True)
class Meta:
    """What meta.json says. Offsets, lengths and counts are in elements, not bytes."""

    dtype: np.dtype[Any]  # little-endian
    parts: tuple[tuple[str, int], ...]  # (file name, elements) in the order of the offsets
    offsets: NDArray[np.int64]  # [series]
    lengths: NDArray[np.int64]  # [series]
    means: NDArray[np.float64] | None  # [series]; None if nothing was stored scaled
    stds: NDArray[np.float64] | None


def read_meta(path: Path) -> Meta:
    """Read and check a meta.json; every error names the file and the series.

    It can be 10 MB of JSON objects, of which a few arrays are kept.
    """
    data = _load(path)
    missing = [key for key in ("num_sequences", "dtype", "files", "scales") if key not in data]
    if missing:
        raise UserError(f"{path} lacks {', '.join(map(repr, missing))}.")
    dtype, parts, scales = _dtype(path, data["dtype"]), _parts(path, data["files"]), data["scales"]
    if not isinstance(scales, list) or not all(isinstance(scale, dict) for scale in scales):
        raise UserError(f"{path}: 'scales' must be a list of objects.")
    if data["num_sequences"] != len(scales):
        said = json.dumps(data["num_sequences"])[:20]
        raise UserError(f"{path}: 'num_sequences' is {said}, but 'scales' has {len(scales):,}.")
    if not scales:
        raise UserError(f"{path} holds no series.")
    offsets, lengths = _integers(path, scales, "offset"), _integers(path, scales, "length")
    _check_ends(path, offsets, lengths, sum(count for _, count in parts))
    return Meta(dtype, parts, offsets, lengths, *_scaling(path, scales))


def _load(path: Path) -> dict[str, Any]:
    data = parse_json(read_input(path), path)
    if not isinstance(data, dict):
        raise UserError(f"{path} must be a JSON object with 'dtype', 'files' and 'scales'.")
    return data


def _dtype(path: Path, name: Any) -> np.dtype[Any]:
    if name not in DTYPES:
        raise UserError(f"{path}: unknown dtype {name!r}.", did_you_mean(str(name), DTYPES))
    return np.dtype(name).newbyteorder("<")


def _parts(path: Path, files: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(files, dict) or not files:
        raise UserError(f"{path}: 'files' must name the .bin files and their elements.")
    numbered: dict[int, tuple[str, int]] = {}
    for name, count in files.items():
        match = PART.fullmatch(name)
        if match is None:
            raise UserError(f"{path}: the file {name!r} is not called data-<k>-of-<n>.bin.")
        if type(count) is not int or count < 0:
            raise UserError(f"{path}: {name} has {json.dumps(count)[:20]} elements.")
        if int(match[2]) != len(files) or int(match[1]) in numbered:
            raise UserError(
                f"{path}: {name} is listed among {len(files)} files.", "Is one missing?"
            )
        numbered[int(match[1])] = (name, count)
    return tuple(part for _, part in sorted(numbered.items()))


def _integers(path: Path, scales: list[dict[str, Any]], key: str) -> NDArray[np.int64]:
    values = [scale.get(key) for scale in scales]
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 2**62:
            said = "missing" if value is None else json.dumps(value)[:20]
            raise UserError(f"{path}: '{key}' of series {index} is {said}.")
    return np.array(values, np.int64)


def _check_ends(
    path: Path, offsets: NDArray[np.int64], lengths: NDArray[np.int64], total: int
) -> None:
    beyond = np.flatnonzero(offsets + lengths > total)
    if len(beyond):
        index = int(beyond[0])
        raise UserError(
            f"{path}: series {index} ends at element {offsets[index] + lengths[index]:,}, but its "
            f"files hold {total:,} ({len(beyond):,} series run past the end)."
        )


def _scaling(
    path: Path, scales: list[dict[str, Any]]
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    if not any("mean" in scale or "std" in scale for scale in scales):
        return None, None
    for index, scale in enumerate(scales):
        if ("mean" in scale) != ("std" in scale):
            raise UserError(f"{path}: series {index} has only one of 'mean' and 'std'.")
    means = _floats(path, "mean", (scale.get("mean", 0.0) for scale in scales))
    stds = _floats(path, "std", (scale.get("std", 1.0) for scale in scales))
    if (stds < 0).any():
        raise UserError(f"{path}: 'std' of series {int(np.argmax(stds < 0))} is negative.")
    return means, stds


def _floats(path: Path, key: str, values: Iterable[Any]) -> NDArray[np.float64]:
    numbers = []
    for index, value in enumerate(values):
        if type(value) not in (int, float) or not abs(value) < 1e300:
            raise UserError(f"{path}: '{key}' of series {index} is {json.dumps(value)[:20]}.")
        numbers.append(float(value))
    return np.array(numbers, np.float64)


FORMAT = {META: lambda path: Time300B(path.parent)}
