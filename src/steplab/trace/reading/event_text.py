"""EventText: the events of a JSON text of any size, decoded in chunks of complete events.

A chunk is cut where its end looks like the border of two events. Whether it is one the decoder
tells: a text cut inside a string or a nested list is no complete list. Only then, and at the end
of the list, are the brackets counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from steplab.errors import UserError
from steplab.trace.reading.decode import Event, decode_events, mended
from steplab.trace.reading.refusals import malformed, mistake_at, truncated
from steplab.trace.reading.structure import elements

BORDER = re.compile(rb"\}\s*,\s*(?=\{)")
# Where the border is searched, from the end: the longest events have some 10 KB of shapes.
BORDER_ROOM = 1 << 16
LEADING_COMMA = re.compile(rb"\s*,?\s*")
# A number or word that the end of the text cuts in two may look like a mistake.
UNSURE_ROOM = 32


class EventText:
    """Iterate over it once; then `rest` is the text from the list's closing bracket on."""

    def __init__(self, text: bytes, pieces: Iterator[bytes], offset: int, name: str) -> None:
        self._text = text  # read but not yet decoded; at first, from the list's first element on
        self._pieces = pieces
        self.offset = offset  # byte of the file at which _text begins
        self._name = name
        self._wanted = 0  # bytes of _text below which another look is useless
        self._closed = False
        self.count = 0  # elements decoded so far

    @property
    def rest(self) -> bytes:
        """The text that is left."""
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
                raise truncated(self._name, self.offset + len(self._text), self.count)
        self._text += b"".join(self._pieces)

    def _read(self) -> bool:
        """Read on until there is enough for another look; False at the end of the file."""
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
        """Decode up to the last border of two events, if it is one."""
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
        """Decode up to where the brackets say that an element, or the list, ends."""
        found = elements(self._text)
        self._closed = found.closed
        if not found.closed and not found.end:
            self._check_incomplete()
            # Twice as much each time: looking stays linear in the size of the file.
            self._wanted = 2 * len(self._text)
            return []
        self._wanted = 0
        listed = self._list_until(found.end)
        try:
            events = decode_events(listed)
        except msgspec.DecodeError:
            events = self._decode_mended(listed)
        self._advance(found.end)
        return events

    def _decode_mended(self, listed: bytes) -> Sequence[Event | None]:
        try:
            return decode_events(mended(listed))
        except msgspec.DecodeError as error:
            raise self._malformed(error) from error

    def _check_incomplete(self) -> None:
        """Raise if the text has a mistake, and is not just the beginning of an element."""
        try:
            begun = b"[" + self._text[self._begin() :]
            msgspec.json.decode(mended(begun), type=list[msgspec.Raw])
        except msgspec.DecodeError as error:
            if (mistake_at(error) or len(begun)) < len(begun) - UNSURE_ROOM:
                raise self._malformed(error) from error

    def _malformed(self, error: msgspec.DecodeError) -> UserError:
        byte = self.offset + self._begin() + (mistake_at(error) or 1) - 1
        return malformed(self._name, byte, error)

    def _begin(self) -> int:
        """Where the first element begins; the text may start with the comma before it."""
        comma = LEADING_COMMA.match(self._text)
        return comma.end() if comma else 0

    def _list_until(self, end: int) -> bytes:
        """Return the elements before `end` as a JSON list."""
        begin = min(self._begin(), end)
        listed = b"".join((b"[", memoryview(self._text)[begin:end], b"]"))
        # Some writers leave a comma behind the last event.
        return listed[:-1].rstrip().removesuffix(b",") + b"]" if self._closed else listed

    def _advance(self, end: int) -> None:
        self._text = self._text[end:]
        self.offset += end
