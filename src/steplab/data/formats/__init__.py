"""File formats of series, one file each, and how a path becomes a set of series.

A format is a file in this folder that defines `FORMAT`: openers by suffix, or by file name where
the name decides. An opener takes the path and returns a SeriesSet.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from steplab.core import registry
from steplab.core.errors import UserError, did_you_mean
from steplab.core.input_file import is_folder, is_missing, shorten
from steplab.data.formats.time300b import META, PART
from steplab.data.series import JoinedSeries, SeriesSet

Opener = Callable[[Path], SeriesSet]
PICKLES = (".pkl", ".pickle")
CLEANING_REPORT = "cleaning.json"  # what `steplab data clean` writes beside its series
SHIPPED_PREFIX, SHIPPED_SUFFIX = "shipped:", ".npz"
SHIPPED = Path(__file__).parents[1] / "shipped"  # real series that come with the package


@cache
def openers() -> Mapping[str, Opener]:
    """Return the openers of all formats by suffix (`.npy`) or file name (`meta.json`)."""
    found: dict[str, Opener] = {}
    for name in registry.names(__name__, "FORMAT"):
        found.update(registry.load(__name__, name, "FORMAT"))
    return found


def open_series(path: Path | str) -> SeriesSet:
    """Open a file of series, `shipped:NAME`, or a folder with everything in it and below it.

    In a folder every subfolder with a meta.json is one Time-300B dataset; other files are read
    by their suffix; files of other kinds (a README, a table) and hidden folders are skipped.
    Everything is joined in the order of the paths, so that an index means the same series on
    every machine.
    """
    path = resolve_path(path)
    check_exists(path)
    try:
        return _open_folder(path) if is_folder(path) else _open_file(path)
    except OSError as error:
        raise UserError(f"{shorten(path)} cannot be read: {error.strerror or error}.") from error


def shipped_names() -> list[str]:
    """Return what may follow `shipped:`."""
    return sorted(path.stem for path in SHIPPED.glob(f"*{SHIPPED_SUFFIX}"))


def resolve_path(path: Path | str) -> Path:
    """Return the file that `shipped:NAME` stands for; any other path as it is."""
    text = str(path)
    if not text.startswith(SHIPPED_PREFIX):
        return Path(path)
    name = text.removeprefix(SHIPPED_PREFIX)
    if name not in shipped_names():
        raise UserError(f"There is no {text}.", did_you_mean(name, shipped_names()))
    return SHIPPED / f"{name}{SHIPPED_SUFFIX}"


def _opener(path: Path) -> Opener | None:
    return openers().get(path.name) or openers().get(path.suffix.lower())


def _known() -> str:
    suffixes = ", ".join(key for key in openers() if key.startswith("."))
    return f"Known: a Time-300B folder ({META} and .bin files), {suffixes}."


def check_exists(path: Path) -> None:
    """Refuse a path that leads to no regular file or folder; a similar name is suggested."""
    if is_missing(path):
        raise UserError(f"{shorten(path)} does not exist.", _similar(path))
    is_folder(path)


def _open_file(path: Path) -> SeriesSet:
    if is_folder(path):
        raise UserError(f"{shorten(path)} is a folder with the name of a file.", "Rename it.")
    if path.suffix.lower() in PICKLES:
        raise UserError(
            f"{path} is a pickle, which can run any code when it is opened, so it is refused.",
            "Save the numbers as .npy, .npz or .jsonl instead.",
        )
    opener = _opener(path)
    if opener is None:
        hint = "Give its folder." if PART.fullmatch(path.name) else _known()
        raise UserError(f"{path} is not a file of series that steplab can read.", hint)
    if path.name != META and path.stat().st_size == 0:
        raise UserError(f"{path} is empty.")
    return opener(path)


def _open_folder(folder: Path) -> SeriesSet:
    members = [_open_file(path) for path in _walk(folder)]
    if not members:
        raise UserError(f"{folder} holds no series.", _known())
    return members[0] if len(members) == 1 else JoinedSeries(str(folder), members)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield every meta.json and every other file of series, in the order of the paths.

    Links to folders are followed; each folder is visited once.
    """
    seen: set[str] = set()
    for where, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        real = os.path.realpath(where)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from _series_files(Path(where), sorted(files))


def _series_files(folder: Path, files: list[str]) -> Iterator[Path]:
    parts = [name for name in files if PART.fullmatch(name)]
    if parts and META not in files:
        raise UserError(
            f"{folder / parts[0]} has no {META} beside it, so its series cannot be told apart.",
            "Copy or download the dataset again.",
        )
    for name in files:
        path = folder / name
        if name.startswith(".") or name == CLEANING_REPORT:
            continue
        if _opener(path) is not None or path.suffix.lower() in PICKLES:
            yield path


def _raise(error: OSError) -> None:
    raise error


def _similar(path: Path) -> str:
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"Did you mean {str(parent / close[0])!r}?" if close else "Check the path."
