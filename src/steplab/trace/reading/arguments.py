"""Arguments: what events say of themselves beyond name and time, one class per kind of event."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, field

from steplab.trace.reading.decode import Instant, Span

NOT_RECORDED = Raw(b"")


class OpArgs(Struct, gc=False):
    """What an operator says of itself."""

    sequence: int = field(default=-1, name="Sequence number")
    forward_thread: int = field(default=0, name="Fwd thread id")
    values: Raw = field(default=NOT_RECORDED, name="Concrete Inputs")
    dtypes: Raw = field(default=NOT_RECORDED, name="Input type")
    strides: Raw = field(default=NOT_RECORDED, name="Input Strides")
    shapes: Raw = field(default=NOT_RECORDED, name="Input Dims")
    early_shapes: Raw = field(default=NOT_RECORDED, name="Input dims")  # torch 1.8


class CallArgs(Struct, gc=False):
    """What a call of the CUDA runtime says of itself."""

    correlation: int = -1


class DeviceArgs(Struct, gc=False):
    """What a kernel, copy or fill says of itself."""

    device: int | None = None
    stream: int | None = None
    correlation: int = -1
    bytes: int = 0
    graph: int = field(default=0, name="graph id")
    grid: tuple[int, ...] = (0,)


class MemoryArgs(Struct, gc=False):
    """What an allocation or a free says of itself."""

    bytes: int = field(default=0, name="Bytes")
    address: int = field(default=0, name="Addr")
    allocated: int = field(default=0, name="Total Allocated")
    device_type: int = field(default=0, name="Device Type")  # torch's number; 0 is the CPU


Args = TypeVar("Args", bound=Struct)
Decoded = TypeVar("Decoded")


def decode_args(events: Sequence[Span | Instant], kind: type[Args]) -> list[Args]:
    """Decode the arguments of many events at once; unreadable ones count as not recorded."""
    try:
        joined = b",".join([event.args for event in events])
        return _args_decoder(list[kind]).decode(b"[" + joined + b"]")  # type: ignore[valid-type]
    except msgspec.ValidationError:
        return [_args_or_default(event.args, kind) for event in events]


def _args_or_default(text: Raw, kind: type[Args]) -> Args:
    try:
        return _args_decoder(kind).decode(text)
    except msgspec.ValidationError:
        return kind()


@cache
def _args_decoder(kind: type[Decoded]) -> msgspec.json.Decoder[Decoded]:
    return msgspec.json.Decoder(kind, strict=False)
