"""Head: finds the list of events in a trace's text, and reads what stands around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from steplab.errors import UserError
from steplab.trace.reading import refusals
from steplab.trace.reading.decode import mended
from steplab.trace.reading.structure import depth_after

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BEGINNING = re.compile(rb"(?:\xef\xbb\xbf)?\s*(\S)")
LIST_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
LIST_KEY_ROOM = 1 << 10  # more blanks than this in "traceEvents": [ nobody writes


@dataclass(frozen=True)
class Head:
    """The beginning of a file, divided at its list of events."""

    before: bytes  # up to and with the opening bracket
    after: bytes  # what was read behind it


def read_head(pieces: Iterator[bytes], name: str) -> Head:
    """Read as far as the list of events: the file itself, or its outermost "traceEvents"."""
    text, searched = bytearray(), 0
    for piece in pieces:
        text += piece
        beginning = BEGINNING.match(text)
        if beginning is None:
            continue
        if beginning[1] not in b"[{":
            raise refusals.not_json(name, bytes(text[beginning.start(1) :][:16]))
        end = beginning.end() if beginning[1] == b"[" else _list_start(text, searched)
        if end:
            return Head(bytes(text[:end]), bytes(text[end:]))
        searched = max(0, len(text) - LIST_KEY_ROOM)
    raise _no_list(bytes(text), name)


def _list_start(text: bytearray, searched: int) -> int:
    """Return the byte behind the opening bracket of the list; 0 if there is none yet."""
    for key in LIST_KEY.finditer(text, searched):
        if depth_after(bytes(text[: key.start()])) == 1:
            return key.end()
    return 0


def _no_list(text: bytes, name: str) -> UserError:
    if not text.strip():
        return refusals.empty(name)
    try:
        msgspec.json.decode(text.removeprefix(BYTE_ORDER_MARK), type=msgspec.Raw)
    except msgspec.DecodeError as error:
        byte = refusals.mistake_at(error)
        if byte is None:
            return refusals.truncated(name, len(text), 0)
        return refusals.malformed(name, byte, error)
    return refusals.no_list(name)


def read_properties(
    head: Head, rest: bytes, offset: int, name: str, events: int
) -> dict[str, object]:
    """Return the other keys of a file; `rest`, at byte `offset`, follows on the last element.

    Head and rest together are the file with an empty list.
    """
    text = head.before.removeprefix(BYTE_ORDER_MARK) + rest
    try:
        document = msgspec.json.decode(mended(text))
    except msgspec.DecodeError as error:
        byte = refusals.mistake_at(error)
        if byte is None:
            raise refusals.truncated(name, offset + len(rest), events) from error
        missing = offset - len(head.before) if byte >= len(head.before) else 0
        raise refusals.malformed(name, byte + missing, error) from error
    if not isinstance(document, dict):
        return {}
    return {key: value for key, value in document.items() if key != "traceEvents"}
