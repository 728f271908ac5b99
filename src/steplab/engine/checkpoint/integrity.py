"""Is a checkpoint what was written? Asked before any of it is loaded."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

from steplab.engine.checkpoint.document import Document, Seal, parse
from steplab.engine.checkpoint.folder import (
    CHECKPOINT_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    RNG_FILE,
    checkpoints,
)
from steplab.errors import UserError

CHUNK = 16 * 2**20  # bytes


def read_document(path: Path) -> Document:
    """Return what checkpoint.json says; the tensor files are not looked at."""
    return _or_name_a_good_one(_parsed, path)


def read_intact(path: Path) -> Document:
    """Return the document after the size and checksum of every tensor file have been checked."""
    return _or_name_a_good_one(_checked, path)


def _or_name_a_good_one(read: Callable[[Path], Document], path: Path) -> Document:
    """Let the error about a damaged checkpoint name the last good one before it, if any."""
    try:
        return read(path)
    except UserError as damage:
        if damage.suggestion:
            raise
        good = _last_good_before(path)
        raise UserError(damage.message, f"Resume from {good} instead." if good else "") from None


def _parsed(path: Path) -> Document:
    file = path / CHECKPOINT_FILE
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is not a complete checkpoint: it has no {file.name}.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from None
    return parse(text, str(file))


def _checked(path: Path) -> Document:
    document = _parsed(path)
    for name in (MODEL_FILE, OPTIMIZER_FILE, RNG_FILE):
        if name not in document.files:
            raise UserError(f"{path / CHECKPOINT_FILE} is damaged: it does not mention {name}.")
        _check_file(path / name, document.files[name])
    return document


def _check_file(path: Path, seal: Seal) -> None:
    try:
        size = path.stat().st_size
        if size != seal.size:
            raise UserError(f"{path} is damaged: it has {size} bytes instead of {seal.size}.")
        crc32 = _crc32(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    if crc32 != seal.crc32:
        raise UserError(f"{path} is damaged: its content does not match its checksum.")


def _crc32(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _last_good_before(path: Path) -> Path | None:
    siblings = checkpoints(path.parent)
    for older in reversed(siblings[: siblings.index(path)] if path in siblings else siblings):
        try:
            _checked(older)
        except UserError:
            continue
        return older
    return None
