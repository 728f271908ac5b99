"""Decode: JSON events to typed objects. Times, which must stay exact, and arguments stay text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import msgspec
from msgspec import Raw, Struct, defstruct

# Times without decimals would take the slow way of `nanoseconds` for their whole chunk.
NO_DURATION = Raw(b"0.000")
NO_ARGS = Raw(b"{}")

Place = int | str | None  # a process, thread, device or stream


class Span(Struct, tag_field="ph", tag="X", gc=False):
    """An event with a beginning and a length."""

    ts: Raw  # microseconds
    name: str = ""
    cat: str = ""
    pid: Place = 0
    tid: Place = 0
    dur: Raw = NO_DURATION
    args: Raw = NO_ARGS


class Begin(Struct, tag_field="ph", tag="B", gc=False):
    """The beginning of a span whose end is another event."""

    ts: Raw
    name: str = ""
    cat: str = ""
    pid: Place = 0
    tid: Place = 0
    args: Raw = NO_ARGS


class End(Struct, tag_field="ph", tag="E", gc=False):
    """The end of the span that began last on its thread."""

    ts: Raw
    pid: Place = 0
    tid: Place = 0


class Instant(Struct, tag_field="ph", tag="i", gc=False):
    """A moment, such as an allocation."""

    ts: Raw
    name: str = ""
    args: Raw = NO_ARGS


Event = Span | Begin | End | Instant | Struct

# All other phases of the format (flow arrows, metadata, counters, async events...) hold nothing
# that is read here: their text is passed over, no field is made.
UNREAD = tuple(
    defstruct(f"Unread{ord(phase)}", (), tag_field="ph", tag=phase, gc=False)
    for phase in "stfMCIPbneSTpFNODRcVv(),"
)
_EVENT: Any = reduce(or_, UNREAD, Span | Begin | End | Instant)
_EVENTS = msgspec.json.Decoder(list[_EVENT], strict=False)
_ONE_EVENT = msgspec.json.Decoder(_EVENT, strict=False)
_TEXTS = msgspec.json.Decoder(list[Raw])

NON_FINITE = re.compile(rb'(":\s*)-?(?:nan|inf(?:inity)?)\b', re.IGNORECASE)
# Between values they are blanks, in strings they are forbidden.
CONTROL_TO_BLANK = bytes.maketrans(bytes(range(32)), b" " * 32)


def decode_events(text: bytes) -> Sequence[Event | None]:
    """Decode a JSON list of events; None stands for an element that is no event.

    Raises msgspec.DecodeError if the text is not one complete JSON list.
    """
    try:
        return _EVENTS.decode(text)
    except msgspec.ValidationError:
        return [_event_or_none(one) for one in _TEXTS.decode(text)]
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("a name is not UTF-8") from error


def mended(text: bytes) -> bytes:
    """Return a text without what JSON forbids but programs write.

    Numbers such as NaN, control characters in names, and bytes that are not UTF-8.
    """
    finite = NON_FINITE.sub(rb"\1null", text.translate(CONTROL_TO_BLANK))
    return finite.decode(errors="replace").encode()


def _event_or_none(text: Raw) -> Event | None:
    try:
        return _ONE_EVENT.decode(text)
    except msgspec.ValidationError:
        return None
