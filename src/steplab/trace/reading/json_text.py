"""Finds the list of events in a trace's JSON text and decodes it in chunks of whole events.

A chunk ends where the text looks like the border between two events. The decoder shows whether it
is one: text cut inside a string or a nested list is not a complete list. Only when that guess
fails, and at the end of the list, are the brackets counted. A file that cannot be read gets an
error with one sentence and a suggestion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from steplab.core.errors import UserError, did_you_mean
from steplab.trace.reading.decode import Event, decode_events, repair_json

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
ESCAPE = re.compile(rb"\\.", re.DOTALL)
DECODER_BYTE = re.compile(r"\s*\(byte (\d+)\)")

RECORD_HINT = "Give the file that torch.profiler's export_chrome_trace wrote (.json or .json.gz)."
# Other files that people keep beside traces, by their first bytes.
FOREIGN_FILES = {
    b"\x80": "a pickle, such as torch.cuda.memory._dump_snapshot writes",
    b"PK\x03\x04": "a zip archive, such as torch.save writes",
    b"SQLite format 3": "an SQLite database, such as Nsight Systems exports",
}


@dataclass(frozen=True)
class Head:
    """The beginning of a file, split where its list of events begins."""

    before: bytes  # up to and including the opening bracket
    after: bytes  # what was read after it


def read_head(pieces: Iterator[bytes], name: str) -> Head:
    """Read up to the list of events: the whole file, or the outermost "traceEvents" in it."""
    text, searched = bytearray(), 0
    for piece in pieces:
        text += piece
        beginning = BEGINNING.match(text)
        if beginning is None:
            continue
        if beginning[1] not in b"[{":
            raise not_json_error(name, bytes(text[beginning.start(1) :][:16]))
        end = beginning.end() if beginning[1] == b"[" else _list_start(text, searched)
        if end:
            return Head(bytes(text[:end]), bytes(text[end:]))
        searched = max(0, len(text) - LIST_KEY_ROOM)
    raise _no_list_error(bytes(text), name)


def _list_start(text: bytearray, searched: int) -> int:
    """Return the position after the opening bracket of the list; 0 if there is none yet."""
    for key in LIST_KEY.finditer(text, searched):
        if depth_after(bytes(text[: key.start()])) == 1:
            return key.end()
    return 0


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


def read_properties(
    head: Head, rest: bytes, offset: int, name: str, events: int
) -> dict[str, object]:
    """Return the other keys of a file; `rest`, at byte `offset`, follows the last element.

    Head and rest together are the file with an empty list of events.
    """
    text = head.before.removeprefix(BYTE_ORDER_MARK) + rest
    try:
        document = msgspec.json.decode(repair_json(text))
    except msgspec.DecodeError as error:
        byte = error_byte(error)
        if byte is None:
            raise truncated_error(name, offset + len(rest), events) from error
        missing = offset - len(head.before) if byte >= len(head.before) else 0
        raise malformed_error(name, byte + missing, error) from error
    if not isinstance(document, dict):
        return {}
    return {key: value for key, value in document.items() if key != "traceEvents"}


class EventChunks:
    """The events of a list, chunk by chunk; None stands for an element that is not an event.

    Iterate once; afterward `rest` is the text from the closing bracket of the list on.
    """

    def __init__(self, text: bytes, pieces: Iterator[bytes], offset: int, name: str) -> None:
        self._text = text  # read but not yet decoded; begins with the first element of the list
        self._pieces = pieces
        self.offset = offset  # byte of the file at which _text begins
        self._name = name
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
        self._text += b"".join(self._pieces)

    def _read(self) -> bool:
        """Read until another attempt can succeed; False at the end of the file."""
        parts = [self._text]
        size = len(self._text)
        while piece := next(self._pieces, b""):
            parts.append(piece)
            size += len(piece)
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
    positions, depths = _brackets(text)
    closing = np.flatnonzero(depths < 0)
    if len(closing):
        return Elements(int(positions[closing[0]]), True)
    complete = np.flatnonzero(depths == 0)
    return Elements(int(positions[complete[-1]]) + 1 if len(complete) else 0, False)


def depth_after(text: bytes) -> int:
    """Return how many brackets are open at the end of `text`."""
    depths = _brackets(text)[1]
    return int(depths[-1]) if len(depths) else 0


def _brackets(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of all brackets outside strings, and the depth after each."""
    # Backslashes occur only in strings; a replacement of the same length keeps all positions.
    plain = ESCAPE.sub(b"__", text) if b"\\" in text else text
    codes = np.frombuffer(plain, np.uint8)
    quotes = np.flatnonzero(codes == ord('"'))
    upper = codes & 0xDF  # folds "{" onto "[" and "}" onto "]"
    positions = np.flatnonzero((upper == ord("[")) | (upper == ord("]")))
    positions = positions[np.searchsorted(quotes, positions) % 2 == 0]
    return positions, np.cumsum(np.where(upper[positions] == ord("["), 1, -1))


def error_byte(error: msgspec.DecodeError) -> int | None:
    """Return the byte at which the decoder saw a mistake; None: the text ended too early."""
    found = DECODER_BYTE.search(str(error))
    return int(found[1]) if found else None


def missing_file_error(path: Path) -> UserError:
    """There is nothing at `path`, or a folder."""
    if path.is_dir():
        return UserError(f"{path} is a folder, not a trace.", "Name one file in it.")
    folder = path.parent
    names = [p.name for p in folder.iterdir() if p.is_file()] if folder.is_dir() else []
    traces = [name for name in names if name.endswith((".json", ".gz"))]
    return UserError(f"There is no file {path}.", did_you_mean(path.name, traces) if traces else "")


def empty_file_error(name: str) -> UserError:
    """The file has no text at all."""
    return UserError(f"{name} is empty.", RECORD_HINT)


def not_json_error(name: str, text: bytes) -> UserError:
    """The file begins with neither [ nor {."""
    for beginning, what in FOREIGN_FILES.items():
        if text.startswith(beginning):
            return UserError(f"{name} is {what}, not a trace.", RECORD_HINT)
    return UserError(f"{name} is not JSON: it begins with {text[:12]!r}.", RECORD_HINT)


def malformed_error(name: str, byte: int, error: msgspec.DecodeError) -> UserError:
    """The text is not JSON from a known byte on."""
    reason = DECODER_BYTE.sub("", str(error)).removeprefix("JSON is malformed: ")
    return UserError(f"{name} is not valid JSON at byte {byte:,} ({reason}).", "Record it again.")


def truncated_error(name: str, byte: int, events: int) -> UserError:
    """The text ends before its brackets are closed."""
    return UserError(
        f"{name} ends too early, at byte {byte:,} after {events:,} complete events.",
        "Copy it again, or wait until the profiler has written it.",
    )


def no_event_list_error(name: str) -> UserError:
    """The file is valid JSON of another kind."""
    return UserError(f'{name} is JSON, but not a trace: it has no list "traceEvents".', RECORD_HINT)


def no_events_error(name: str, seen: int) -> UserError:
    """The list holds nothing that a profiler of PyTorch writes."""
    if not seen:
        return UserError(f"{name} holds no events.", "Was a step run while the profiler was on?")
    return UserError(
        f"{name} holds {seen:,} events, but no operator, range, call, kernel or allocation.",
        RECORD_HINT,
    )
