"""checkpoint.json: all of a checkpoint that is not a tensor, and checksums of its tensor files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.core.upgrade import VERSION, check_version, upgrade
from steplab.train.checkpoint_folder import (
    CHECKPOINT_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    RNG_FILE,
    list_checkpoints,
)

CHUNK = 16 * 2**20  # bytes read at a time


@dataclass(frozen=True)
class TrainProgress:
    """How far a training is: the part of the manifest that the training loop owns.

    `position` and `spec` are plain JSON data: string keys, lists instead of tuples.
    """

    step: int  # optimizer steps done
    position: Mapping[str, Any]  # where the data continues; only its reader understands it
    spec: Mapping[str, Any]  # what is being trained, and how
    metrics: Mapping[str, float] = field(default_factory=dict)  # the last losses and rates
    steplab: str = ""  # version; like the next two, filled in by `save_checkpoint`
    torch: str = ""  # version
    created: str = ""  # UTC, ISO 8601


@dataclass(frozen=True)
class FileChecksum:
    """What a file must have to be intact."""

    size: int  # bytes
    crc32: int


@dataclass(frozen=True)
class ParamGroup:
    """One parameter group of an optimizer: names, and settings such as lr and betas."""

    parameters: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer without its tensors."""

    kind: str  # name of its class
    groups: tuple[ParamGroup, ...]
    values: Mapping[str, Mapping[str, Any]]  # parameter -> key -> state that is not a tensor


@dataclass(frozen=True)
class PythonRngState:
    """State of the generator behind the module `random`."""

    version: int
    words: tuple[int, ...]
    gauss: float | None


@dataclass(frozen=True)
class NumpyRngState:
    """State of numpy's global Mersenne Twister."""

    key: tuple[int, ...]
    position: int
    has_gauss: int
    gauss: float


@dataclass(frozen=True)
class Manifest:
    """The content of checkpoint.json."""

    progress: TrainProgress
    optimizer: OptimizerRecord
    scaler: Mapping[str, int | float]  # empty when gradients are not scaled
    python_random: PythonRngState
    numpy_random: NumpyRngState
    files: Mapping[str, FileChecksum]  # by name of the tensor file


def manifest_to_json(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, with its version and a checksum of its content."""
    content = encode(manifest)
    head = {"steplab_checkpoint": VERSION, "crc32": _checksum(content)}
    return json.dumps({**head, "content": content}, allow_nan=False).encode()


def manifest_from_json(text: bytes, where: str) -> Manifest:
    """Read a manifest; one that is foreign, damaged or newer is a UserError."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is damaged: it is not JSON.") from None
    version = data.get("steplab_checkpoint") if isinstance(data, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UserError(f"{where} does not belong to a steplab checkpoint.")
    check_version(version, where)
    if data.get("crc32") != _checksum(data.get("content")):
        raise UserError(f"{where} is damaged: its content does not match its checksum.")
    manifest: Manifest = decode(Manifest, upgrade("checkpoint", version, data["content"]), where)
    return manifest


def _checksum(content: Any) -> int:
    """Return a checksum of the data itself: indentation and the order of keys do not matter."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def read_manifest(path: Path) -> Manifest:
    """Return what checkpoint.json says; the tensor files are not checked."""
    return _suggest_a_good_one(_read, path)


def read_verified_manifest(path: Path) -> Manifest:
    """Return the manifest once size and checksum of every tensor file have been verified."""
    return _suggest_a_good_one(_read_and_verify, path)


def _suggest_a_good_one(read: Callable[[Path], Manifest], path: Path) -> Manifest:
    """Read; the error about a damaged checkpoint names the last good one before it, if any."""
    try:
        return read(path)
    except UserError as damage:
        if damage.suggestion:
            raise
        good = _last_good_before(path)
        raise UserError(damage.message, f"Resume from {good} instead." if good else "") from None


def _read(path: Path) -> Manifest:
    file = path / CHECKPOINT_FILE
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is not a complete checkpoint: it has no {file.name}.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from None
    return manifest_from_json(text, str(file))


def _read_and_verify(path: Path) -> Manifest:
    manifest = _read(path)
    for name in (MODEL_FILE, OPTIMIZER_FILE, RNG_FILE):
        if name not in manifest.files:
            raise UserError(f"{path / CHECKPOINT_FILE} is damaged: it does not mention {name}.")
        _check_file(path / name, manifest.files[name])
    return manifest


def _check_file(path: Path, expected: FileChecksum) -> None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise UserError(f"{path} is damaged: it has {size} bytes instead of {expected.size}.")
        crc32 = _crc32(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    if crc32 != expected.crc32:
        raise UserError(f"{path} is damaged: its content does not match its checksum.")


def _crc32(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _last_good_before(path: Path) -> Path | None:
    siblings = list_checkpoints(path.parent)
    for older in reversed(siblings[: siblings.index(path)] if path in siblings else siblings):
        try:
            _read_and_verify(older)
        except UserError:
            continue
        return older
    return None
