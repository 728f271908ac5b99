"""Tensors by name, to a safetensors file and back.

Written here and not by the library for three reasons: device tensors reach the host one at a time
instead of all at once (6.5 GB for 538 M parameters with AdamW), the checksum is taken of the bytes
in memory, and a full disk is an OSError. The library reads.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from steplab.core.errors import Unsupported, UserError
from steplab.train.checkpoint_files import FileChecksum

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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileChecksum:
    """Write the tensors and flush them to disk; return the file's size and checksum."""
    size, crc32 = 0, 0
    with path.open("xb") as file:
        for chunk in _chunks(tensors):
            file.write(chunk)
            size, crc32 = size + len(chunk), zlib.crc32(chunk, crc32)
        file.flush()
        os.fsync(file.fileno())
    return FileChecksum(size, crc32)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, on the host; they may share memory with the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from None


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the file's length field, header and data."""
    # Wide elements first, so that every tensor starts at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
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
