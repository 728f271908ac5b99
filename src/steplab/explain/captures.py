"""Captures: the CUDA graphs that were still being captured in the profiled steps."""

from __future__ import annotations

import numpy as np

from steplab.explain.case import Case
from steplab.trace.events import Ints, Trace

BEGIN, END = "StreamBeginCapture", "GraphInstantiate"


def captures(case: Case) -> tuple[float, ...]:
    """Return the ms of the host from each capture's beginning to its instantiation."""
    if case.analysis is None or not case.on_device:
        return ()
    calls = case.analysis.trace.calls
    starts = calls.start[_calls(case.analysis.trace, BEGIN)]
    spent = []
    for row in _calls(case.analysis.trace, END):
        before = starts[starts <= calls.start[row]]
        began = before[-1] if len(before) else calls.start[row]
        spent.append(float(calls.end[row] - began) / 1e6)
    return tuple(spent)


def _calls(trace: Trace, part: str) -> Ints:
    named = np.array([part in text for text in trace.texts], dtype=bool)
    return np.flatnonzero(named[trace.calls.name])
