"""Loads a Kineto or Chrome trace of any size: JSON, gzip or not, from any version of torch.

Linear in the number of events. In memory are the columns and a few pieces of text, never the file.
Times are exact to the nanosecond, since 1970 where the file says what its own are relative to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from steplab.errors import UserError
from steplab.trace.events import Trace
from steplab.trace.reading import refusals
from steplab.trace.reading.event_text import EventText
from steplab.trace.reading.head import read_head, read_properties
from steplab.trace.reading.nanoseconds import LATEST
from steplab.trace.reading.pieces import read_ahead
from steplab.trace.reading.tables import Tables

# Bytes of text. What is made of 16 MB no longer fits a cache: 20 % slower; 1 MB is no faster.
PIECE = 4 << 20
SUFFIXES = (".json", ".gz")
BASE_TIME = "baseTimeNanoseconds"


def names_trace(word: str) -> bool:
    """Whether a word of the command line is a trace file and no Run's id; `runs/` is a folder."""
    is_path = word.endswith(SUFFIXES) or Path(word).is_file()
    return is_path or (os.sep in word and Path(word).is_dir())


def load_trace(path: Path) -> Trace:
    """Load the trace in a file."""
    if not path.is_file():
        raise refusals.no_file(path)
    try:
        with path.open("rb") as stream:
            return read_trace(stream, str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error


def read_trace(stream: BinaryIO, name: str, piece: int = PIECE) -> Trace:
    """Read a trace in pieces of `piece` bytes; `name` is what messages call it."""
    # Closed here also after an error: left to the garbage collector, the reader's own thread may
    # be the one that collects it, and a thread cannot wait for itself.
    with contextlib.closing(read_ahead(stream, piece, name)) as pieces:
        return _read(pieces, name)


def _read(pieces: Iterator[bytes], name: str) -> Trace:
    head = read_head(pieces, name)
    text = EventText(head.after, pieces, len(head.before), name)
    tables = Tables()
    for events in text:
        tables.add(events)
    properties = read_properties(head, text.rest, text.offset, name, text.count)
    if not tables.kept:
        raise refusals.no_events(name, text.count)
    base = properties.get(BASE_TIME)
    if not isinstance(base, int) or not 0 <= base < LATEST:
        base = 0
    return tables.trace(properties, base)
