"""checkpoint.json: everything that is not a tensor, and the seals of the tensor files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steplab.codec import decode, encode
from steplab.engine.checkpoint.progress import Progress
from steplab.errors import UserError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Seal:
    """What a file's content must add up to."""

    size: int  # bytes
    crc32: int


@dataclass(frozen=True)
class Group:
    """One parameter group of an optimizer: names, and settings such as lr and betas."""

    parameters: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer without its tensors."""

    kind: str  # name of its class
    groups: tuple[Group, ...]
    values: Mapping[str, Mapping[str, Any]]  # parameter -> key -> state that is not a tensor


@dataclass(frozen=True)
class PythonRandom:
    """State of the generator behind the module `random`."""

    version: int
    words: tuple[int, ...]
    gauss: float | None


@dataclass(frozen=True)
class NumpyRandom:
    """State of numpy's global Mersenne Twister."""

    key: tuple[int, ...]
    position: int
    has_gauss: int
    gauss: float


@dataclass(frozen=True)
class Document:
    """The content of checkpoint.json."""

    progress: Progress
    optimizer: OptimizerRecord
    scaler: Mapping[str, int | float]  # empty when gradients are not scaled
    python_random: PythonRandom
    numpy_random: NumpyRandom
    files: Mapping[str, Seal]  # tensor file -> seal


def render(document: Document) -> bytes:
    """Write the document as JSON, with its format version and a checksum of its content."""
    content = encode(document)
    head = {"steplab_checkpoint": FORMAT_VERSION, "crc32": _checksum(content)}
    return json.dumps({**head, "content": content}, allow_nan=False).encode()


def parse(text: bytes, where: str) -> Document:
    """Read a document; a foreign, damaged or newer one is a UserError that says so."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is damaged: it is not JSON.") from None
    version = data.get("steplab_checkpoint") if isinstance(data, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UserError(f"{where} does not belong to a steplab checkpoint.")
    if version > FORMAT_VERSION:
        raise UserError(
            f"{where} has format version {version}; this steplab reads up to {FORMAT_VERSION}.",
            "Upgrade steplab to read it.",
        )
    if data.get("crc32") != _checksum(data.get("content")):
        raise UserError(f"{where} is damaged: its content does not match its checksum.")
    document: Document = decode(Document, data["content"], where)
    return document


def _checksum(content: Any) -> int:
    """Return a checksum of the data itself: indentation and the order of keys do not matter."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
