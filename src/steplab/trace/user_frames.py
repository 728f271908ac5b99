"""Which line of the user's code is running, or has failed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import FrameType

from steplab.trace.lines import Frame, innermost_line


def calling_line(within: str) -> str | None:
    """Return the innermost line of the user's code that is running now.

    Only what was called by the file `within` counts, not who called that file.
    """
    return innermost_line(_running(within))


def error_line(error: BaseException) -> str:
    """Return the innermost line of the user's code in a traceback, else the innermost of all.

    Code that dynamo was tracing and code that is no Python are not in the traceback: their errors
    bring the place with them.
    """
    traced = getattr(error, "real_stack", None) or ()
    frames = [*traceback.extract_tb(error.__traceback__), *traced]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>"))
    last = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else "unknown"
    return innermost_line((f.filename, f.lineno or 0, f.name) for f in reversed(frames)) or last


def _running(within: str) -> Iterator[Frame]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != within:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
