"""Lines of user code while they run, as ranges of torch's profiler: "line:model.py:12 (forward)".

The profiler's own stacks have the line where a function begins. Here Python itself tells which line
it enters (`sys.settrace`), and a range is open until the next one: an operator, a launch or a pause
then lies in the range of its line, on the profiler's clock. Operators are recorded as they are.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from steplab.probes.compilation import graph_count
from steplab.trace.lines import LINE_RANGE, frame_line

# Of each line. A loop over a million items would fill the disk; its later turns stay in the range
# that was opened last, a line of the same loop.
MOST_RANGES = 10_000


@contextlib.contextmanager
def line_ranges() -> Iterator[None]:
    """Open a range for every line of user code that this thread enters inside the block."""
    before = sys.gettrace()
    tracer = _LineTracer()
    sys.settrace(tracer.told)
    try:
        yield
    finally:
        sys.settrace(before)
        tracer.close()


class _LineTracer:
    """Takes Python's word that a function, a line or its end begins."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, _Lines | None] = {}
        self._open: dict[FrameType, Any] = {}  # the range that each running function is in
        # Inside compiled code Dynamo would trace the tracer. Keeping it out costs some us a line.
        self.told: Callable[..., Any] = self._told
        if graph_count():
            self.told = torch.compiler.disable(self._told)

    def _told(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        """Return who is to be told of the function's lines; None for functions of libraries."""
        lines = self._lines_of(frame.f_code)
        if lines is None:
            return None
        name = lines.name(frame.f_lineno) if event == "line" else None
        if (name or event == "return") and frame in self._open:  # a yield is a return, too
            self._open.pop(frame).__exit__(None, None, None)
        if name:
            self._open[frame] = opened = _RecordFunctionFast(name)
            opened.__enter__()
        return self.told

    def _lines_of(self, code: CodeType) -> _Lines | None:
        if code not in self._codes:
            shown = frame_line((code.co_filename, code.co_firstlineno, code.co_name))
            self._codes[code] = _Lines(code) if shown else None
        return self._codes[code]

    def close(self) -> None:
        """Close the ranges of functions that are still running, the innermost first."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)


class _Lines:
    """The names of the ranges of one function's lines."""

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._names: dict[int, str] = {}
        self._opened: Counter[int] = Counter()

    def name(self, line: int) -> str | None:
        """Return the name of the range to open for a line; None where there are enough of them."""
        self._opened[line] += 1
        if self._opened[line] > MOST_RANGES:
            return None
        if line not in self._names:
            shown = frame_line((self._code.co_filename, line, self._code.co_name))
            self._names[line] = f"{LINE_RANGE}{shown}"
        return self._names[line]
