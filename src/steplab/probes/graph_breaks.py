"""Where dynamo ended a graph, or gave a function up.

Its counter of breaks leaves out branches by a value and functions that it leaves uncompiled, so
both are read where it keeps the reasons: its list of cut graphs, and its record of compilations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

from steplab.trace.lines import user_line

# Breaks that dynamo handles itself have words of its own for a reason.
WORDS = {
    "generic_jump": "Data-dependent branching",
    "step_unsupported": "Unsupported code that no graph can be cut around",
    "comprehension_graph_break": "Break inside a comprehension",
}
GIVEN_UP = "Unsupported"  # the exception that leaves a function uncompiled


def graph_breaks() -> dict[str, int]:
    """Return reason and line -> count since dynamo was last reset."""
    found: Counter[str] = Counter()
    for cut in graph_break_reasons:
        found[_with_place(_reason(cut.reason), _lines(reversed(cut.user_stack)))] += 1
    for compiled in get_compilation_metrics():
        if compiled.fail_type == GIVEN_UP:
            found[f"{compiled.co_name} left uncompiled: {_given_up(compiled)}"] += 1
    return dict(found)


def first_line(text: str) -> str:
    """Return the first line of what may be a page."""
    return text.strip().splitlines()[0] if text.strip() else ""


def _reason(text: str) -> str:
    first = first_line(text)
    return WORDS.get(first.split(" ", 1)[0], first)


def _given_up(compiled: Any) -> str:
    path, line = compiled.fail_user_frame_filename, compiled.fail_user_frame_lineno
    place = user_line(f"{path}({line}): {compiled.co_name}") if path else None
    return _with_place(_reason(compiled.fail_reason or ""), [place])


def _lines(frames: Iterable[Any]) -> Iterable[str | None]:
    return (user_line(f"{frame.filename}({frame.lineno}): {frame.name}") for frame in frames)


def _with_place(reason: str, lines: Iterable[str | None]) -> str:
    """Add the first line that is the user's."""
    place = next(filter(None, lines), None)
    return f"{reason}, {place}" if place else reason
