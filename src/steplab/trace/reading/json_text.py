"""Finds the list of events in a trace's JSON text and decodes it in chunks of whole events.

A chunk ends where the text looks like the border between two events. The decoder shows whether it
is one: text cut inside a string or a nested list is not a complete list. Only when that guess
fails, and at the end of the list, are the brackets counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from steplab.core.errors import UserError
from steplab.trace.reading.decode import Event, Properties, decode_events, repair_json
from steplab.trace.reading.limits import LONGEST_TEXT, ReadingLimits
from steplab.trace.reading.refusals import (
    empty_file_error,
    error_byte,
    malformed_error,
    no_event_list_error,
    not_json_error,
    truncated_error,
)

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BEGINNING = re.compile(rb"(?:\xef\xbb\xbf)?\s*(\S)")
LIST_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
LIST_KEY_ROOM = 1 << 10  # nobody writes more blanks than this in "traceEvents": [
BORDER = re.compile(rb"\}\s*,\s*(?=\{)")
# Bytes at the end in which a border is searched for: the longest events have some 10 KB of shapes.
BORDER_ROOM = 1 << 16
LEADING_COMMA = re.compile(rb"\s*,?\s*")
# A number or word cut in two by the end of the text may look like a mistake.
UNSURE_ROOM = 32
BRACKET_BLOCK = 1 << 20
ESCAPE = re.compile(rb"\\.", re.DOTALL)


@dataclass(frozen=True)
class Head:
    """The beginning of a file, split where its list of events begins."""

    before: bytes  # up to and including the opening bracket
    after: bytes  # what was read after it


def read_head(pieces: Iterator[bytes], name: str, limits: ReadingLimits) -> Head:
    """Read up to the list of events: the whole file, or the outermost "traceEvents" in it."""
    text, searched, wanted = bytearray(), 0, 0
    for piece in pieces:
        limits.check_text(len(text) + len(piece))
        text += piece
        beginning = BEGINNING.match(text) if len(text) >= wanted else None
        if beginning is None:
            continue
        if beginning[1] not in b"[{":
            raise not_json_error(name, bytes(text[beginning.start(1) :][:16]))
        end = beginning.end() if beginning[1] == b"[" else _list_start(text, searched)
        if end:
            return Head(bytes(text[:end]), bytes(text[end:]))
        searched = max(0, len(text) - LIST_KEY_ROOM)
        wanted = 2 * len(text)  # twice as much each time: linear in the size of the file
    if end := _list_start(text, searched):
        return Head(bytes(text[:end]), bytes(text[end:]))
    raise _no_list_error(bytes(text), name)


def _list_start(text: bytearray, searched: int) -> int:
    """Return the position after the opening bracket of the list; 0 if there is none yet."""
    keys = list(LIST_KEY.finditer(text, searched))
    if not keys:
        return 0
    depths = find_brackets(bytes(text)).depths_at([key.start() for key in keys])
    return next((key.end() for key, depth in zip(keys, depths, strict=True) if depth == 1), 0)


def _no_list_error(text: bytes, name: str) -> UserError:
    if not text.strip():
        return empty_file_error(name)
    try:
        msgspec.json.decode(text.removeprefix(BYTE_ORDER_MARK), type=msgspec.Raw)
    except msgspec.DecodeError as error:
        byte = error_byte(error)
        if byte is None:
            return truncated_error(name, len(text), 0)
        return malformed_error(name, byte, error)
    return no_event_list_error(name)


def read_properties(head: Head, rest: bytes, offset: int, name: str, events: int) -> Properties:
    """Read the other keys of a file; `rest`, at byte `offset`, follows the last element.

    Head and rest together are the file with an empty list of events.
    """
    text = head.before.removeprefix(BYTE_ORDER_MARK) + rest
    try:
        document = msgspec.json.decode(repair_json(text), type=Properties | list)
    except msgspec.DecodeError as error:
        byte = error_byte(error)
        if byte is None:
            raise truncated_error(name, offset + len(rest), events) from error
        missing = offset - len(head.before) if byte >= len(head.before) else 0
        raise malformed_error(name, byte + missing, error) from error
    return document if isinstance(document, Properties) else Properties()


class EventChunks:
    """The events of a list, chunk by chunk; None stands for an element that is not an event.

    Iterate once; afterward `rest` is the text from the closing bracket of the list on.
    """

    def __init__(
        self, head: Head, pieces: Iterator[bytes], name: str, limits: ReadingLimits
    ) -> None:
        self._text = head.after  # not yet decoded; begins with the first element of the list
        self._pieces = pieces
        self.offset = len(head.before)  # byte of the file at which _text begins
        self._name = name
        self._limits = limits
        self._wanted = 0  # bytes that _text must have before another attempt can succeed
        self._closed = False
        self.count = 0  # elements decoded so far

    @property
    def rest(self) -> bytes:
        """The text that is not decoded."""
        return self._text

    def __iter__(self) -> Iterator[Sequence[Event | None]]:
        while not self._closed:
            more = self._read()
            events = self._up_to_border() if more else None
            if events is None:
                events = self._up_to_bracket()
            if events:
                self.count += len(events)
                yield events
            if not more and not self._closed:
                self._check_incomplete()
                raise truncated_error(self._name, self.offset + len(self._text), self.count)
        self._wanted = LONGEST_TEXT  # all that is left; more is refused
        self._read()

    def _read(self) -> bool:
        """Read until another attempt can succeed; False at the end of the file."""
        parts = [self._text]
        size = len(self._text)
        while piece := next(self._pieces, b""):
            parts.append(piece)
            size += len(piece)
            self._limits.check_text(size)
            if size >= self._wanted:
                break
        self._text = b"".join(parts)
        return bool(piece)

    def _up_to_border(self) -> Sequence[Event | None] | None:
        """Decode up to the last border between two events; None if that was none."""
        borders = list(BORDER.finditer(self._text, max(0, len(self._text) - BORDER_ROOM)))
        if not borders:
            return None
        try:
            events = decode_events(self._list_until(borders[-1].start() + 1))
        except msgspec.DecodeError:
            return None
        self._advance(borders[-1].end())
        return events

    def _up_to_bracket(self) -> Sequence[Event | None]:
        """Decode up to the end of an element, or of the list, found by counting brackets."""
        found = complete_elements(self._text)
        self._closed = found.closed
        if not found.closed and not found.end:
            self._check_incomplete()
            # Twice as much each time keeps the effort linear in the size of the file.
            self._wanted = 2 * len(self._text)
            return []
        self._wanted = 0
        listed = self._list_until(found.end)
        try:
            events = decode_events(listed)
        except msgspec.DecodeError:
            events = self._decode_repaired(listed)
        self._advance(found.end)
        return events

    def _decode_repaired(self, listed: bytes) -> Sequence[Event | None]:
        try:
            return decode_events(repair_json(listed))
        except msgspec.DecodeError as error:
            raise self._malformed(error) from error

    def _check_incomplete(self) -> None:
        """Raise if the text has a mistake, and is not merely the beginning of an element."""
        try:
            begun = b"[" + self._text[self._begin() :]
            msgspec.json.decode(repair_json(begun), type=list[msgspec.Raw])
        except msgspec.DecodeError as error:
            if (error_byte(error) or len(begun)) < len(begun) - UNSURE_ROOM:
                raise self._malformed(error) from error

    def _malformed(self, error: msgspec.DecodeError) -> UserError:
        byte = self.offset + self._begin() + (error_byte(error) or 1) - 1
        return malformed_error(self._name, byte, error)

    def _begin(self) -> int:
        """Return where the first element begins; the text may start with the comma before it."""
        comma = LEADING_COMMA.match(self._text)
        return comma.end() if comma else 0

    def _list_until(self, end: int) -> bytes:
        """Return the elements before `end` as a JSON list."""
        begin = min(self._begin(), end)
        listed = b"".join((b"[", memoryview(self._text)[begin:end], b"]"))
        # Some writers leave a comma after the last event.
        return listed[:-1].rstrip().removesuffix(b",") + b"]" if self._closed else listed

    def _advance(self, end: int) -> None:
        self._text = self._text[end:]
        self.offset += end


@dataclass(frozen=True)
class Elements:
    """How far the complete elements of a list reach in a text that begins inside it."""

    end: int  # byte after the last complete element; if closed, that of the closing bracket
    closed: bool  # whether the list ends in this text


def complete_elements(text: bytes) -> Elements:
    """Find the complete elements of a list; the text begins with one, outside any string."""
    brackets = find_brackets(text)
    closing = np.flatnonzero(brackets.depths < 0)
    if len(closing):
        return Elements(int(brackets.positions[closing[0]]), True)
    complete = np.flatnonzero(brackets.depths == 0)
    return Elements(int(brackets.positions[complete[-1]]) + 1 if len(complete) else 0, False)


@dataclass(frozen=True)
class Brackets:
    """All brackets outside strings, and how many are open after each."""

    positions: NDArray[np.int32]
    depths: NDArray[np.int32]

    def depths_at(self, positions: Sequence[int]) -> list[int]:
        """Return how many brackets are open before each position."""
        before = np.searchsorted(self.positions, np.array(positions, np.int32))
        return np.concatenate(([0], self.depths))[before].tolist()


def find_brackets(text: bytes) -> Brackets:
    """Find the brackets block by block: positions in 64 bits take eight times the text."""
    # Backslashes occur only in strings; a replacement of the same length keeps all positions.
    plain = ESCAPE.sub(b"__", text) if b"\\" in text else text
    positions, steps = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    quoted = 0  # quotes so far, modulo 2
    for begin in range(0, len(plain), BRACKET_BLOCK):
        codes = np.frombuffer(plain, np.uint8, min(BRACKET_BLOCK, len(plain) - begin), begin)
        quotes = np.flatnonzero(codes == ord('"'))
        upper = codes & 0xDF  # folds "{" onto "[" and "}" onto "]"
        found = np.flatnonzero((upper == ord("[")) | (upper == ord("]")))
        found = found[(np.searchsorted(quotes, found) + quoted) % 2 == 0]
        positions.append((found + begin).astype(np.int32))
        steps.append(np.where(upper[found] == ord("["), 1, -1).astype(np.int32))
        quoted = (quoted + len(quotes)) % 2
    return Brackets(np.concatenate(positions), np.cumsum(np.concatenate(steps), dtype=np.int32))
