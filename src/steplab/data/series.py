"""A set of series, and how a path becomes one."""

from __future__ import annotations

import difflib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import SteplabError, UserError
from steplab.data.formats.arrays import open_npy, read_npz
from steplab.data.formats.frames import open_frame
from steplab.data.formats.jsonl import read_json, read_jsonl
from steplab.data.formats.time300b import META, PART, Time300B
from steplab.data.points import JoinedSeries
from steplab.data.shipped import resolve_path


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

        Must not read the rest of the series where the format allows it.
        """
        ...


class SeriesSet(Source, Protocol):
    """Many series of one channel each, read by windows."""

    def read(self, index: int, start: int, stop: int) -> NDArray[np.float32]:
        """Return points [start, stop) of series `index`, in its own units."""
        ...


OPENERS: dict[str, Callable[[Path], SeriesSet]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".npy": open_npy,
    ".npz": read_npz,
    ".csv": open_frame,
    ".parquet": open_frame,
}
PICKLES = (".pkl", ".pickle")
CLEANING = "cleaning.json"  # the report that `steplab data clean` writes beside its series
KNOWN = f"Known: a Time-300B folder ({META} and .bin files), {', '.join(OPENERS)}."


def open_series(path: Path | str) -> SeriesSet:
    """Open a file of series, `shipped:NAME`, or a folder with all that lies in it and below it.

    In a folder every sub-folder with a meta.json is one Time-300B dataset; loose files are read
    by their suffix; files of other kinds (a README, a table) and hidden folders are passed over.
    Everything is joined in the order of the paths, so that an index means the same series on
    every machine.
    """
    path = resolve_path(path)
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.name == META and path.is_file():
            return Time300B(path.parent)
        return _open_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def notes(series: Source) -> list[str]:
    """Return what a user should be told of a set and is no fault: columns left out, gaps."""
    found = list(getattr(series, "notes", ()))
    for member in getattr(series, "members", ()):
        found += notes(member)
    return found


def _open_file(path: Path) -> SeriesSet:
    if not path.is_file():
        if path.exists():
            raise UserError(f"{path} is neither a file nor a folder.", KNOWN)
        raise UserError(f"{path} does not exist.", _near(path))
    suffix = path.suffix.lower()
    if suffix in PICKLES:
        raise UserError(
            f"{path} is a pickle, and a pickle can run any code when it is opened, so it is "
            "refused.",
            "Save the numbers as .npy, .npz or .jsonl instead.",
        )
    if suffix not in OPENERS:
        hint = "Give its folder." if PART.fullmatch(path.name) else KNOWN
        raise UserError(f"{path} is not a file of series that steplab can read.", hint)
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty.")
    return OPENERS[suffix](path)


def _open_folder(folder: Path) -> SeriesSet:
    members = [
        Time300B(path.parent) if path.name == META else _open_file(path) for path in _walk(folder)
    ]
    if not members:
        raise UserError(f"{folder} holds no series.", KNOWN)
    return members[0] if len(members) == 1 else JoinedSeries(str(folder), members)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield every meta.json and every loose file of series, in the order of the paths.

    Links to folders are followed, each folder is visited once.
    """
    seen: set[str] = set()
    for where, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(where)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from _wanted(Path(where), sorted(files))


def _wanted(folder: Path, files: list[str]) -> Iterator[Path]:
    parts = [name for name in files if PART.fullmatch(name)]
    if parts and META not in files:
        raise UserError(
            f"{folder / parts[0]} has no {META} beside it, so its series cannot be told apart.",
            "Copy or download the dataset again.",
        )
    for name in files:
        if name.startswith(".") or name == CLEANING:
            continue
        if Path(name).suffix.lower() in (*OPENERS, *PICKLES):
            yield folder / name


def _refuse(error: OSError) -> None:
    raise error


def _near(path: Path) -> str:
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"Did you mean {str(parent / close[0])!r}?" if close else "Check the path."


CHUNK_POINTS = 2**18  # points per read: 1 MiB


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
        except Exception as error:  # whatever a reader raises is told with its place
            raise UserError(
                f"{series.name}: series {index} cannot be read from point {start}: "
                f"{error or type(error).__name__}."
            ) from error


SAMPLED_SERIES, SAMPLED_POINTS = 16, 64  # sampled: 16 reads, however large the set is


def fingerprint(series: Source) -> str:
    """Return a short text that differs when the number, lengths or sampled points differ."""
    check = zlib.crc32(np.ascontiguousarray(series.lengths).tobytes())
    for index in (
        np.linspace(0, len(series) - 1, min(SAMPLED_SERIES, len(series))).astype(int).tolist()
    ):
        length = int(series.lengths[index])
        start = max(0, (length - SAMPLED_POINTS) // 2)
        check = zlib.crc32(
            series.read(index, start, min(length, start + SAMPLED_POINTS)).tobytes(), check
        )
    return f"{len(series)} series, {check:08x}"
