"""Refusals: one sentence and a suggestion for every file that cannot be read as a trace."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from steplab.errors import UserError, did_you_mean

RECORD = "Give the file that torch.profiler's export_chrome_trace wrote (.json or .json.gz)."
# Other files that lie beside traces, by how they begin.
FOREIGN = {
    b"\x80": "a pickle, such as torch.cuda.memory._dump_snapshot writes",
    b"PK\x03\x04": "a zip archive, such as torch.save writes",
    b"SQLite format 3": "an SQLite database, such as Nsight Systems exports",
}

DECODER_PLACE = re.compile(r"\s*\(byte (\d+)\)")


def mistake_at(error: msgspec.DecodeError) -> int | None:
    """Return the byte at which the decoder saw a mistake; None: the text just ended."""
    place = DECODER_PLACE.search(str(error))
    return int(place[1]) if place else None


def no_file(path: Path) -> UserError:
    """Nothing is at `path`, or a folder is."""
    if path.is_dir():
        return UserError(f"{path} is a folder, not a trace.", "Name one file in it.")
    folder = path.parent
    names = [p.name for p in folder.iterdir() if p.is_file()] if folder.is_dir() else []
    traces = [name for name in names if name.endswith((".json", ".gz"))]
    return UserError(f"There is no file {path}.", did_you_mean(path.name, traces) if traces else "")


def empty(name: str) -> UserError:
    """The file has no text at all."""
    return UserError(f"{name} is empty.", RECORD)


def not_json(name: str, text: bytes) -> UserError:
    """The file begins with neither bracket."""
    for beginning, what in FOREIGN.items():
        if text.startswith(beginning):
            return UserError(f"{name} is {what}, not a trace.", RECORD)
    return UserError(f"{name} is not JSON: it begins with {text[:12]!r}.", RECORD)


def malformed(name: str, byte: int, error: msgspec.DecodeError) -> UserError:
    """The text breaks the rules of JSON at a known place."""
    reason = DECODER_PLACE.sub("", str(error)).removeprefix("JSON is malformed: ")
    return UserError(f"{name} is not valid JSON at byte {byte:,} ({reason}).", "Record it again.")


def truncated(name: str, byte: int, events: int) -> UserError:
    """The text ends before its brackets are closed."""
    return UserError(
        f"{name} ends too early, at byte {byte:,} after {events:,} complete events.",
        "Copy it again, or wait until the profiler has written it.",
    )


def no_list(name: str) -> UserError:
    """Valid JSON of another kind."""
    return UserError(f'{name} is JSON, but no trace: it has no list "traceEvents".', RECORD)


def no_events(name: str, seen: int) -> UserError:
    """A list with nothing in it that a profiler of PyTorch writes."""
    if not seen:
        return UserError(f"{name} holds no events.", "Was a step run while the profiler was on?")
    return UserError(
        f"{name} holds {seen:,} events, but no operator, range, call, kernel or allocation.", RECORD
    )
