"""Text from files and drivers, made harmless for a terminal."""

from __future__ import annotations

import contextlib
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any, TextIO, cast

# Control characters, among them ESC; marks without width or that turn the direction of writing;
# halves of surrogate pairs; separators of lines and paragraphs.
STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    """Return the text with "?" for what would steer a terminal; lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or not _steers(c) else "?" for c in text)


def _steers(character: str) -> bool:
    return unicodedata.category(character) in STEERING


class PrintableStream:
    """A stream that passes on printable text only; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text made harmless."""
        return self.stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Let whatever is printed on stdout and stderr go through `printable`.

    Names stand in hundreds of sentences, and one that is forgotten is enough.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream itself, for those who draw with colors and make their text printable."""
    return stream.stream if isinstance(stream, PrintableStream) else stream
