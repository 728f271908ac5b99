"""Files of tensors: safetensors with a checksum, of whole tensors or of slices, read in pieces.

The header of a file of slices says where each lies in its tensor, in the words of
torch.distributed.checkpoint, whose HuggingFaceStorageReader reads a folder of such files too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from steplab.core.codec import decode
from steplab.core.errors import Unsupported, UserError
from steplab.core.input_file import parse_json
from steplab.train.checkpoint_files import FileChecksum
from steplab.train.slices import Slice, own_slice, placed_like

OFFSETS_KEY = "DCP_SHARDING_INFO"  # in the header: {name: {"saved_offsets": [...]}} as text
VERSION_KEY, VERSION = "DCP_VERSION", "1.0"
# Names of dtypes in a safetensors file.
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None = None
) -> FileChecksum:
    """Write a safetensors file and flush it to disk; return its size and checksum.

    `offsets` says where each tensor lies in the one that it is a slice of.

    Not by the library, for three reasons: device tensors reach the host one at a time instead of
    all at once (6.5 GB for 538 M parameters with AdamW), the checksum is taken of the bytes in
    memory, and a full disk is an OSError.
    """
    size, crc32 = 0, 0
    with path.open("xb") as file:
        for chunk in _chunks(tensors, offsets):
            file.write(chunk)
            size, crc32 = size + len(chunk), zlib.crc32(chunk, crc32)
        file.flush()
        os.fsync(file.fileno())
    return FileChecksum(size, crc32)


def _chunks(
    tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]] | None
) -> Iterator[bytes | memoryview]:
    """Yield the file's length field, header and data."""
    # Wide elements first, so that every tensor starts at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    metadata = {"format": "pt"}
    if offsets is not None:
        places = {name: {"saved_offsets": list(offsets[name])} for name, _ in ordered}
        metadata |= {OFFSETS_KEY: json.dumps(places), VERSION_KEY: VERSION}
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in CODES or tensor.layout != torch.strided:
            raise Unsupported(
                f"A checkpoint cannot hold {name}: {tensor.dtype}, {tensor.layout}.",
                f"It holds strided tensors of {', '.join(CODES.values())}.",
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        entry = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class StoredSlice:
    """A slice and the file that has it."""

    file: Path
    part: Slice


class SavedTensors:
    """The tensors of some safetensors files, whole or in slices; nothing is read before `read`.

    Every tensor is checked to be there once and without gaps, so that what reading one allocates is
    as large as what the files hold of it. Call `close`, or use it as a context.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.slices: dict[str, list[StoredSlice]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.open_files = contextlib.ExitStack()
        self.files: dict[Path, Any] = {}
        try:
            for file in files:
                self._add(file)
            self.shapes = {name: _whole_shape(name, parts) for name, parts in self.slices.items()}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self.open_files.close()

    def read(self, name: str, part: Slice | None = None) -> Tensor:
        """Return a tensor or a slice of it, on the host; it may share memory with its file."""
        asked = part or Slice((0,) * len(self.shapes[name]), self.shapes[name])
        stored = self.slices[name]
        if len(stored) == 1 and asked == stored[0].part:
            tensor: Tensor = self.files[stored[0].file].get_tensor(name)
            return tensor
        found = torch.empty(asked.shape, dtype=self.dtypes[name])
        for each in stored:
            overlap = asked.overlap(each.part)
            if overlap is not None:
                rows = self.files[each.file].get_slice(name)[overlap.within(each.part).index]
                found[overlap.within(asked).index] = rows
        return found

    def read_like(self, name: str, target: Tensor) -> Tensor:
        """Return what a rank that holds `target` needs of a tensor, in the form of `target`."""
        return placed_like(self.read(name, own_slice(target)[0]), target)

    def _add(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            opened = self.open_files.enter_context(safe_open(file, framework="pt"))
            names, offsets = opened.keys(), _offsets(opened.metadata(), file)
            for name in names:
                header = opened.get_slice(name)
                shape = tuple(header.get_shape())
                part = Slice(offsets.get(name, (0,) * len(shape)), shape)
                self._add_slice(name, StoredSlice(file, part), header.get_dtype())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read ({error}).") from None
        self.files[file] = opened

    def _add_slice(self, name: str, stored: StoredSlice, code: str) -> None:
        if len(stored.part.offset) != len(stored.part.shape):
            raise UserError(f"{stored.file} is damaged: the offsets of {name} are not those of it.")
        dtype = next((known for known, its in CODES.items() if its == code), None)
        if dtype is None:
            raise UserError(f"{stored.file} holds {name} as {code}, which no checkpoint has.")
        if self.dtypes.setdefault(name, dtype) != dtype:
            raise UserError(f"{stored.file} is damaged: slices of {name} have different dtypes.")
        self.slices.setdefault(name, []).append(stored)


def _offsets(metadata: Mapping[str, str] | None, file: Path) -> dict[str, tuple[int, ...]]:
    """Return where the slices of a file lie; nothing is said of a file of whole tensors."""
    text = (metadata or {}).get(OFFSETS_KEY)
    if text is None:
        return {}
    data = parse_json(text, f"{file}: {OFFSETS_KEY}")
    found = decode(Mapping[str, Mapping[str, tuple[int, ...]]], data, f"{file}: {OFFSETS_KEY}")
    return {name: entry.get("saved_offsets", ()) for name, entry in found.items()}


def _whole_shape(name: str, stored: Sequence[StoredSlice]) -> tuple[int, ...]:
    """Return the shape of a tensor whose slices must be all the cells of a grid, each once."""
    axes = range(len(stored[0].part.shape))
    damaged = UserError(f"{stored[0].file} is damaged: the slices of {name} do not make a tensor.")
    if any(len(each.part.shape) != len(axes) for each in stored):
        raise damaged
    # The lengths of the cells along an axis, by where they begin.
    lengths: list[dict[int, int]] = [
        {each.part.offset[axis]: each.part.shape[axis] for each in stored} for axis in axes
    ]
    for each in stored:
        if any(lengths[axis][each.part.offset[axis]] != each.part.shape[axis] for axis in axes):
            raise damaged
    shape = []
    for cells in lengths:
        end = 0
        for begin in sorted(cells):
            if begin != end:
                raise damaged
            end += cells[begin]
        shape.append(end)
    cells_in_all = math.prod(map(len, lengths))
    if len({each.part.offset for each in stored}) != len(stored) or len(stored) != cells_in_all:
        raise damaged
    return tuple(shape)
