"""What a recorded file holds, read by hand."""

import gzip
import json
from pathlib import Path
from typing import Any


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a compressed trace."""
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def ranges(path: Path) -> list[str]:
    """Return the names of its ranges in order of time."""
    found = [e for e in events(path) if e.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


def named(path: Path, beginning: str) -> list[str]:
    """Return those whose names begin so."""
    return [name for name in ranges(path) if name.startswith(beginning)]
