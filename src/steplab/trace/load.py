"""Loads a Kineto or Chrome trace of any size: JSON, gzip or not, from any version of torch.

Linear in the number of events. Memory holds the columns and a few pieces of text, never the file;
`reading/limits.py` says how much, and what is left out of a damaged file is counted in the Trace.
Times are exact to the nanosecond; they count from 1970 where the file gives its base time.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from steplab.core.errors import UserError
from steplab.core.input_file import cannot_open, open_input, shorten
from steplab.trace.events import Trace
from steplab.trace.reading.json_text import EventChunks, read_head, read_properties
from steplab.trace.reading.limits import ReadingLimits
from steplab.trace.reading.refusals import (
    RUN_FILE,
    SUFFIXES,
    folder_error,
    missing_file_error,
    too_deep_error,
)
from steplab.trace.reading.tables import TraceBuilder

# Bytes of text. What is made of 16 MB no longer fits a cache and is 20 % slower; 1 MB is no faster.
PIECE = 4 << 20
GZIP_MAGIC = b"\x1f\x8b"
GZIP_FORMAT = 31  # zlib's number for "32 KiB window, gzip header and checksum"
# Large enough that one call of zlib, which runs beside the decoder, makes a whole piece of text.
COMPRESSED_BLOCK = 1 << 20


def names_trace(word: str) -> bool:
    """Whether a word of the command line names a file or folder, and not a Run.

    A Run's id has no separators, but its folder may stand in the current one.
    """
    if word.endswith(SUFFIXES) or os.sep in word:
        return True
    path = Path(word)
    return not (path / RUN_FILE).exists() if path.is_dir() else os.path.lexists(path)


def load_trace(path: Path) -> Trace:
    """Load a trace file; a UserError says why it cannot be read."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        raise missing_file_error(path) from None
    except (OSError, ValueError) as error:
        raise cannot_open(path, error) from None
    if path.is_dir():
        raise folder_error(path)
    try:
        with open_input(path) as stream:
            return read_trace(stream, shorten(path))
    except OSError as error:
        raise cannot_open(path, error) from None


def read_trace(stream: BinaryIO, name: str, piece: int = PIECE) -> Trace:
    """Read a trace in pieces of `piece` bytes; `name` is what messages call it."""
    limits = ReadingLimits(name)
    # Closed here even after an error. Left to the garbage collector, it might be collected on the
    # reader's own thread, which cannot wait for itself.
    with contextlib.closing(read_ahead(stream, piece, name, limits)) as pieces:
        try:
            return _read(pieces, name, limits)
        except RecursionError:
            raise too_deep_error(name) from None


def _read(pieces: Iterator[bytes], name: str, limits: ReadingLimits) -> Trace:
    head = read_head(pieces, name, limits)
    text = EventChunks(head, pieces, name, limits)
    tables = TraceBuilder(limits)
    for events in text:
        tables.add(events)
    properties = read_properties(head, text.rest, text.offset, name, text.count)
    return tables.trace(name, properties)


def read_ahead(
    stream: BinaryIO, size: int, name: str, limits: ReadingLimits
) -> Generator[bytes, None, None]:
    """Yield the text of `stream` in pieces of at most `size` bytes, reading one piece ahead."""
    with ThreadPoolExecutor(1) as reader:
        pieces = _pieces(stream, size, name, limits)
        coming = reader.submit(next, pieces, b"")
        while piece := coming.result():
            coming = reader.submit(next, pieces, b"")
            yield piece


def _pieces(stream: BinaryIO, size: int, name: str, limits: ReadingLimits) -> Iterator[bytes]:
    first = stream.read(size)
    while 0 < len(first) < len(GZIP_MAGIC) and (more := stream.read(size)):
        first += more
    if first.startswith(GZIP_MAGIC):
        blocks = iter(lambda: stream.read(COMPRESSED_BLOCK), b"")
        yield from _decompressed(chain([first], blocks), size, name, limits)
    else:
        yield first
        yield from iter(lambda: stream.read(size), b"")


def _decompressed(
    blocks: Iterator[bytes], size: int, name: str, limits: ReadingLimits
) -> Iterator[bytes]:
    """Yield the text of one or several gzip members in a row."""
    member = zlib.decompressobj(GZIP_FORMAT)
    read = written = 0
    try:
        for block in blocks:
            read += len(block)
            while block:
                if member.eof:
                    member = zlib.decompressobj(GZIP_FORMAT)
                if text := member.decompress(block, size):
                    written += len(text)
                    limits.check_ratio(read - len(member.unconsumed_tail), written)
                    yield text
                # Archivers may pad the end with zeros.
                rest = member.unused_data.lstrip(b"\0")
                block = rest if member.eof else member.unconsumed_tail
    except zlib.error as error:
        raise UserError(
            f"{name} is a damaged gzip file after {written:,} bytes of text ({error}).",
            "Copy or record it again.",
        ) from error
    if not member.eof:
        raise UserError(
            f"{name} is a gzip file that ends too early, after {written:,} bytes of text.",
            "Copy it again, or wait until the profiler has written it.",
        )
