"""Files that cannot be read as a trace: one sentence and a suggestion each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from steplab.core.errors import UserError, did_you_mean
from steplab.core.input_file import shorten

SUFFIXES = (".json", ".gz")
RUN_FILE = "run.json"  # in the folder of a stored Run
RECORD_HINT = "Give the file that torch.profiler's export_chrome_trace wrote (.json or .json.gz)."
# Other files that people keep beside traces, by their first bytes.
FOREIGN_FILES = {
    b"\x80": "a pickle, such as torch.cuda.memory._dump_snapshot writes",
    b"PK\x03\x04": "a zip archive, such as torch.save writes",
    b"SQLite format 3": "an SQLite database, such as Nsight Systems exports",
}
DECODER_BYTE = re.compile(r"\s*\(byte (\d+)\)")
MOST_NAMES = 5  # of the traces in a folder that are listed


def error_byte(error: msgspec.DecodeError) -> int | None:
    """Return the byte at which the decoder saw a mistake; None: the text ended too early."""
    found = DECODER_BYTE.search(str(error))
    return int(found[1]) if found else None


def missing_file_error(path: Path) -> UserError:
    """There is nothing at `path`."""
    traces = trace_names(path.parent)
    return UserError(
        f"There is no file {shorten(path)}.", did_you_mean(path.name, traces) if traces else ""
    )


def folder_error(path: Path) -> UserError:
    """A folder instead of one of the traces in it."""
    traces = trace_names(path)
    if not traces:
        return UserError(
            f"{shorten(path)} is a folder, not a trace, and has no .json or .gz in it.", RECORD_HINT
        )
    return UserError(f"{shorten(path)} is a folder, not a trace.", _name_one(traces))


def run_folder_error(path: Path) -> UserError:
    """The folder of a stored Run, which has more than traces in it."""
    where = path.resolve()
    return UserError(
        f"{shorten(path)} is the folder of a Run.",
        f"Name the Run: {where.name} --store {where.parent.parent}.",
    )


def no_ranks_error(path: Path) -> UserError:
    """A folder of several traces, of which some do not say whose they are."""
    return UserError(
        f"{shorten(path)} is a folder whose traces do not all say which rank they are of, inside "
        "(distributedInfo) or by name (rank3).",
        _name_one(trace_names(path)),
    )


def _name_one(traces: Sequence[str]) -> str:
    listed = ", ".join(shorten(name) for name in traces[:MOST_NAMES])
    more = f" and {len(traces) - MOST_NAMES:,} more" if len(traces) > MOST_NAMES else ""
    return f"Name one of: {listed}{more}."


def trace_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder that may be traces; none if it cannot be read."""
    try:
        return sorted(p.name for p in folder.iterdir() if p.name.endswith(SUFFIXES) and p.is_file())
    except (OSError, ValueError):
        return []


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


def unusable_error(name: str, what: str, omissions: Sequence[str]) -> UserError:
    """All events, or all of the device's, were left out."""
    reasons = "; ".join(omissions)
    return UserError(f"None of the {what} in {name} can be used ({reasons}).", "Record it again.")


def too_long_error(name: str, days: float) -> UserError:
    """Times that no recording has, and that 64 bits cannot add up."""
    return UserError(f"The events of {name} lie {days:,.0f} days apart, or last that long.",
                     "No recording does; record it again.")  # fmt: skip


def too_deep_error(name: str) -> UserError:
    """Lists in lists in lists, without end."""
    return UserError(f"{name} has lists or objects nested too deep to read.", RECORD_HINT)
