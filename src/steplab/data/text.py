"""Text as bytes: UTF-8 files and folders, read by windows; one byte is one token."""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError
from steplab.core.input_file import is_folder, open_input

PROBE_BYTES = 2**16  # bytes at a file's start that decide whether it is text
HELD_OUT_EVERY = 20  # of Python's own sources, every 20th file is kept for validation
# Folders among Python's own modules: installed packages, and tests in other encodings.
FOREIGN = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class TextFiles:
    """Files and their lengths in bytes; `read` returns bytes of one file."""

    def __init__(self, name: str, paths: Sequence[Path], notes: Sequence[str] = ()) -> None:
        self.name, self.notes = name, tuple(notes)
        sizes = [path.stat().st_size for path in paths]
        self.paths = [path for path, size in zip(paths, sizes, strict=True) if size]
        self.lengths = np.array([size for size in sizes if size], np.int64)
        if not self.paths:
            raise UserError(f"{name} holds no text.", "Give a UTF-8 file, or a folder of them.")

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes [start, stop) of file `index`."""
        path = self.paths[index]
        try:
            found = np.fromfile(path, np.uint8, stop - start, offset=start)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
        if len(found) != stop - start:
            raise UserError(f"{path} became shorter while it was read.")
        return found


class TextWindows:
    """Windows of `length` tokens every `stride` bytes over all files, one after the other.

    A window reads one byte more than it has tokens: the targets are the tokens shifted by one. It
    may begin in one file and end in another.
    """

    def __init__(self, series: TextFiles, length: int, stride: int) -> None:
        if length < 1 or stride < 1:
            raise UserError(f"Windows of {length} tokens every {stride} bytes are not possible.")
        self.series, self.length, self.stride = series, length, stride
        self.skipped: dict[str, int] = {}
        self._ends = np.cumsum(series.lengths)
        self.total = int(self._ends[-1])
        self._count = 1 + (self.total - length - 1) // stride
        if self.total <= length:
            raise UserError(
                f"{series.name} has {self.total:,} bytes, which do not fill one window of "
                f"{length + 1:,}.",
                "Give more text or a shorter --context.",
            )

    def __len__(self) -> int:
        return self._count

    def read(self, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens, targets), both int64 of shape [length]."""
        if not 0 <= window < self._count:
            raise IndexError(f"window {window} of {self._count}")
        start = window * self.stride
        bytes_ = self._span(start, start + self.length + 1).astype(np.int64)
        return bytes_[:-1], bytes_[1:]

    def _span(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes [start, stop) of all files together."""
        index = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        while start < stop:
            first = int(self._ends[index] - self.series.lengths[index])
            end = min(stop, int(self._ends[index]))
            parts.append(self.series.read(index, start - first, end - first))
            start, index = end, index + 1
        return np.concatenate(parts)


def open_text(path: Path) -> TextFiles:
    """Open a UTF-8 file, or all of them in and below a folder, in the order of their paths.

    In a folder, hidden files and folders are skipped, and so are files that are not text.
    """
    try:
        if not is_folder(path):
            if not is_text(path):
                raise UserError(f"{path} is not UTF-8 text.")
            return TextFiles(str(path), [path])
        files = _walk(path)
        texts = [file for file in files if is_text(file)]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    skipped = len(files) - len(texts)
    notes = [f"{skipped:,} files of {path} are not UTF-8 text and were skipped"] if skipped else []
    return TextFiles(str(path), texts, notes)


def python_sources(held_out: bool) -> TextFiles:
    """Return the modules of Python's standard library: text that every machine has.

    Every 20th is held out; the others are for training.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(folder.rglob("*.py"))
        if not FOREIGN.intersection(path.relative_to(folder).parts) and is_text(path)
    ]
    chosen = [
        p for i, p in enumerate(paths) if (i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2) is held_out
    ]
    if not chosen:
        raise UserError(f"There are no Python sources in {folder}.", "Give --dataset-path.")
    return TextFiles("Python's standard library", chosen)


def is_text(path: Path) -> bool:
    """Return whether the beginning of a file is UTF-8 without zero bytes."""
    with open_input(path) as file:
        start = file.read(PROBE_BYTES)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)  # may end within a character
    except UnicodeDecodeError:
        return False
    return b"\0" not in start


def _walk(folder: Path) -> list[Path]:
    found = []
    for where, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(where, name) for name in sorted(files) if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    return found


def _raise(error: OSError) -> None:
    raise error
