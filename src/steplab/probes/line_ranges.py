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

from torch._C._profiler import _RecordFunctionFast

from steplab.trace.lines import LINE_RANGE, frame_line

# Of each line. A loop over a million items would fill the disk; its later turns stay in the range
# that was opened last, a line of the same loop.
MOST_RANGES = 10_000

TraceFunction = Callable[[FrameType, str, Any], Any]


@contextlib.contextmanager
def line_ranges() -> Iterator[None]:
    """Open a range for every line of user code that this thread enters inside the block."""
    before = sys.gettrace()
    codes: dict[CodeType, _Lines | None] = {}

    def entered(frame: FrameType, event: str, arg: Any) -> TraceFunction | None:
        code = frame.f_code
        if code not in codes:
            codes[code] = _Lines(code) if _is_user_code(code) else None
        lines = codes[code]
        return None if lines is None else _RunningFrame(lines).trace

    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)


def _is_user_code(code: CodeType) -> bool:
    return frame_line((code.co_filename, code.co_firstlineno, code.co_name)) is not None


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


class _RunningFrame:
    """One call of a function: the range of the line that it is at."""

    __slots__ = ("_lines", "_open")

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._open: Any = None

    def trace(self, frame: FrameType, event: str, arg: Any) -> TraceFunction:
        """Take Python's word that a line begins or the function ends; a yield ends it too."""
        name = self._lines.name(frame.f_lineno) if event == "line" else None
        if self._open is not None and (name or event == "return"):
            self._open.__exit__(None, None, None)
            self._open = None
        if name:
            self._open = _RecordFunctionFast(name)
            self._open.__enter__()
        return self.trace
