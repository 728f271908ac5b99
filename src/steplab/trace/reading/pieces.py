"""Pieces: a file's text in blocks of bounded size, gzip or not, read ahead by a second thread."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import BinaryIO

from steplab.errors import UserError

GZIP_MAGIC = b"\x1f\x8b"
GZIP_FORMAT = 31  # zlib's number for "32 KiB window, gzip header and checksum"
# Large enough that one call of zlib, which runs beside the decoder, makes a whole piece of text.
COMPRESSED_BLOCK = 1 << 20


def read_ahead(stream: BinaryIO, size: int, name: str) -> Generator[bytes, None, None]:
    """Yield the text of `stream` in pieces of at most `size` bytes; the next one is under way."""
    with ThreadPoolExecutor(1) as reader:
        pieces = _pieces(stream, size, name)
        coming = reader.submit(next, pieces, b"")
        while piece := coming.result():
            coming = reader.submit(next, pieces, b"")
            yield piece


def _pieces(stream: BinaryIO, size: int, name: str) -> Iterator[bytes]:
    first = stream.read(size)
    while 0 < len(first) < len(GZIP_MAGIC) and (more := stream.read(size)):
        first += more
    if first.startswith(GZIP_MAGIC):
        blocks = iter(lambda: stream.read(COMPRESSED_BLOCK), b"")
        yield from _decompressed(chain([first], blocks), size, name)
    else:
        yield first
        yield from iter(lambda: stream.read(size), b"")


def _decompressed(blocks: Iterator[bytes], size: int, name: str) -> Iterator[bytes]:
    """Yield the text of one or several gzip members in a row."""
    member = zlib.decompressobj(GZIP_FORMAT)
    written = 0
    try:
        for block in blocks:
            while block:
                if member.eof:
                    member = zlib.decompressobj(GZIP_FORMAT)
                if text := member.decompress(block, size):
                    written += len(text)
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
