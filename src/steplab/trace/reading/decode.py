"""Decodes JSON events into typed objects, and their times to whole nanoseconds.

Times stay text at first and are read for a whole chunk at once: a float64 of the microseconds since
1970 is up to 125 ns off. Arguments stay text too and are decoded by kind of event.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw, Struct, defstruct, field

from steplab.trace.events import Ints
from steplab.trace.reading.omissions import NO_ARGUMENTS, Omissions

# Half the range of 64 bits, so that a base time can be added: 2**62 ns after 1970 is the year 2116.
LATEST = 2**62
NO_TIME = LATEST  # stands for a text that is not a time
# With decimals: a time without them sends its whole chunk through the slow path of `nanoseconds`.
NO_DURATION = Raw(b"0.000")
NO_ARGS = Raw(b"{}")

TrackId = int | str | None  # of a process, thread, device or stream


class Span(Struct, tag_field="ph", tag="X", gc=False):
    """An event with a beginning and a length."""

    ts: Raw  # microseconds
    name: str = ""
    cat: str = ""
    pid: TrackId = 0
    tid: TrackId = 0
    dur: Raw = NO_DURATION
    args: Raw = NO_ARGS


class Begin(Struct, tag_field="ph", tag="B", gc=False):
    """The beginning of a span whose end is another event."""

    ts: Raw
    name: str = ""
    cat: str = ""
    pid: TrackId = 0
    tid: TrackId = 0
    args: Raw = NO_ARGS


class End(Struct, tag_field="ph", tag="E", gc=False):
    """The end of the span that began last on its thread."""

    ts: Raw
    pid: TrackId = 0
    tid: TrackId = 0


class Instant(Struct, tag_field="ph", tag="i", gc=False):
    """A moment, such as an allocation."""

    ts: Raw
    name: str = ""
    args: Raw = NO_ARGS


Event = Span | Begin | End | Instant | Struct

# Nothing here reads the other phases of the format (flow arrows, metadata, counters, async events):
# their text is skipped and no field is made.
UNREAD = tuple(
    defstruct(f"Unread{ord(phase)}", (), tag_field="ph", tag=phase, gc=False)
    for phase in "stfMCIPbneSTpFNODRcVv(),"
)
_EVENT: Any = reduce(or_, UNREAD, Span | Begin | End | Instant)
_EVENTS = msgspec.json.Decoder(list[_EVENT], strict=False)
_ONE_EVENT = msgspec.json.Decoder(_EVENT, strict=False)
_TEXTS = msgspec.json.Decoder(list[Raw])

NON_FINITE = re.compile(rb'(":\s*)-?(?:nan|inf(?:inity)?)\b', re.IGNORECASE)
# Between values control characters are blanks; in strings they are forbidden.
CONTROL_TO_BLANK = bytes.maketrans(bytes(range(32)), b" " * 32)


def decode_events(text: bytes) -> Sequence[Event | None]:
    """Decode a JSON list of events; None stands for an element that is not an event.

    Raises msgspec.DecodeError if the text is not one complete JSON list.
    """
    try:
        return _EVENTS.decode(text)
    except msgspec.ValidationError:
        return [_event_or_none(one) for one in _TEXTS.decode(text)]
    except UnicodeDecodeError as error:
        raise _not_utf8() from error


def repair_json(text: bytes) -> bytes:
    """Return a text without what JSON forbids but programs write.

    That is numbers such as NaN, control characters in names, and bytes that are not UTF-8.
    """
    finite = NON_FINITE.sub(rb"\1null", text.translate(CONTROL_TO_BLANK))
    return finite.decode(errors="replace").encode()


def _event_or_none(text: Raw) -> Event | None:
    try:
        return _ONE_EVENT.decode(text)
    except msgspec.ValidationError:
        return None
    except UnicodeDecodeError as error:
        raise _not_utf8() from error


def _not_utf8() -> msgspec.DecodeError:
    return msgspec.DecodeError("a name is not UTF-8")


# As the columns hold them: of 64 bits, and of 32.
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Small = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
NO_VALUE = Raw(b"")


class OpArgs(Struct, gc=False):
    """Arguments of an operator."""

    sequence: Whole = field(default=-1, name="Sequence number")
    forward_thread: Whole = field(default=0, name="Fwd thread id")
    values: Raw = field(default=NO_VALUE, name="Concrete Inputs")
    dtypes: Raw = field(default=NO_VALUE, name="Input type")
    strides: Raw = field(default=NO_VALUE, name="Input Strides")
    shapes: Raw = field(default=NO_VALUE, name="Input Dims")
    early_shapes: Raw = field(default=NO_VALUE, name="Input dims")  # torch 1.8


class CallArgs(Struct, gc=False):
    """Arguments of a call of the CUDA runtime."""

    correlation: Whole = -1


class DeviceArgs(Struct, gc=False):
    """Arguments of a kernel, copy or fill."""

    device: Small | str | None = None
    stream: TrackId = None
    correlation: Whole = -1
    bytes: Whole = 0
    graph: Whole = field(default=0, name="graph id")
    grid: tuple[Count, Count, Count] = (0, 0, 0)


class MessageArgs(Struct, gc=False):
    """What a collective says of itself; gloo and early versions of NCCL give a shape only."""

    collective: str = field(default="", name="Collective name")
    group: str = field(default="", name="Process Group Name")
    members: str = field(default="", name="Process Group Ranks")
    purpose: str = field(default="", name="Process Group Description")
    size: Count = field(default=0, name="Group size")
    sent: Whole = field(default=-1, name="In msg nelems")
    received: Whole = field(default=-1, name="Out msg nelems")
    dtype: str = ""
    sequence: Whole = field(default=-1, name="Seq")
    correlation: Whole = -1
    shapes: Raw = field(default=Raw(b"[]"), name="Input Dims")
    dtypes: Raw = field(default=Raw(b"[]"), name="Input type")


class MemoryArgs(Struct, gc=False):
    """Arguments of an allocation or a free."""

    bytes: int = field(default=0, name="Bytes")
    address: int = field(default=0, name="Addr")
    allocated: int = field(default=0, name="Total Allocated")
    device_type: int = field(default=0, name="Device Type")  # torch's number; 0 is the CPU


class Properties(Struct):
    """What is read of a file besides its events, still as text."""

    devices: Raw = field(default=Raw(b"[]"), name="deviceProperties")
    base: Raw = field(default=Raw(b"0"), name="baseTimeNanoseconds")
    group: Raw = field(default=Raw(b"{}"), name="distributedInfo")
    host: Raw = field(default=Raw(b'""'), name="host_name")


class GroupProperties(Struct):
    """What a file says of the group whose rank recorded it."""

    rank: Count | None = None
    ranks: Count | None = field(default=None, name="world_size")
    groups: Count | None = field(default=None, name="pg_count")


class DeviceProperties(Struct):
    """One GPU of the machine."""

    id: Whole | None = None
    name: str = ""
    memory: Whole | None = field(default=None, name="totalGlobalMem")


Args = TypeVar("Args", bound=Struct)
Decoded = TypeVar("Decoded")
Other = TypeVar("Other")


def decode_args(
    events: Sequence[Span | Instant], kind: type[Args], omissions: Omissions
) -> list[Args]:
    """Decode the arguments of many events at once; unreadable ones count as not recorded."""
    try:
        joined = b",".join([event.args for event in events])
        return _decoder(list[kind]).decode(b"[" + joined + b"]")  # type: ignore[valid-type]
    except (msgspec.ValidationError, UnicodeDecodeError):
        return [_args_or_default(event, kind, omissions) for event in events]


def _args_or_default(event: Span | Instant, kind: type[Args], omissions: Omissions) -> Args:
    try:
        return _decoder(kind).decode(event.args)
    except (msgspec.ValidationError, UnicodeDecodeError):
        if bytes(event.args) != b"null":
            omissions.add(NO_ARGUMENTS, 1, event.name)
        return kind()


def decode_or(kind: type[Decoded], text: Raw, otherwise: Other) -> Decoded | Other:
    """Decode one value; `otherwise` where it is of another type."""
    try:
        return msgspec.json.decode(text, type=kind, strict=False)
    except (msgspec.ValidationError, UnicodeDecodeError):
        return otherwise


@cache
def _decoder(kind: type[Decoded]) -> msgspec.json.Decoder[Decoded]:
    return msgspec.json.Decoder(kind, strict=False)


def nanoseconds(texts: Sequence[Raw]) -> Ints:
    """Return JSON numbers of microseconds as ns, halves to even; NO_TIME for any other text.

    Profilers write microseconds with one to three decimals; such numbers are read all at once.
    """
    if not texts:
        return np.empty(0, np.int64)
    joined = b"\n".join(texts)
    read = _decimals(joined, len(texts)) if b"." in joined else _integers(joined, 1000)
    return np.array([exact_ns(bytes(text)) for text in texts], np.int64) if read is None else read


def _decimals(joined: bytes, count: int) -> Ints | None:
    """Read lines that all have one to three decimals; None if any has not."""
    codes = np.frombuffer(joined, np.uint8)
    dots = np.flatnonzero(codes == ord("."))
    if len(dots) != count:
        return None
    decimals = np.append(np.flatnonzero(codes == ord("\n")), len(codes)) - dots - 1
    if decimals.min() < 1 or decimals.max() > 3:
        return None
    return _integers(joined.replace(b".", b""), 10 ** (3 - decimals))


def _integers(joined: bytes, scale: Ints | int) -> Ints | None:
    """Read lines of digits and multiply them; None if there is anything else, or too many."""
    if joined.translate(None, b"0123456789-\n"):
        return None
    read = np.fromstring(joined, np.int64, sep="\n")
    largest = max(int(read.max()), -int(read.min()))
    return read * scale if largest < LATEST // np.max(scale) else None


def exact_ns(text: bytes) -> int:
    """Read one number of microseconds in any notation as ns; NO_TIME if it is not a time."""
    try:
        exact = Decimal(text.decode().strip('"')) * 1000
        return int(exact.to_integral_value()) if abs(exact) < LATEST else NO_TIME
    except (ArithmeticError, ValueError):
        return NO_TIME
