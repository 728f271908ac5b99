"""CUDA graphs are captured anew for every size of input.

What it sees: graphs that are still captured in the profiled steps.
Why it costs: a capture runs the step slowly once and keeps its own memory; a size that comes
once is never replayed.
Remedy: pad inputs to few sizes, so that the same graphs are replayed.
When it is wrong: a profile that began before all sizes had been seen once.
"""

from __future__ import annotations

import numpy as np

from steplab import units
from steplab.explain.case import Case
from steplab.record import Finding
from steplab.trace.events import Trace

BEGIN, END = "StreamBeginCapture", "GraphInstantiate"


def check(case: Case) -> Finding | None:
    """Count the captures and the host time from each one's beginning to its instantiation."""
    if case.rows is None or case.analysis is None or not case.on_device:
        return None
    trace, steps = case.analysis.trace, case.rows.steps
    begins, ends = _calls(trace, BEGIN), _calls(trace, END)
    if not len(ends):
        return None
    starts = trace.calls.start[begins]
    spent = 0.0
    for row in ends:
        before = starts[starts <= trace.calls.start[row]]
        began = before[-1] if len(before) else trace.calls.start[row]
        spent += float(trace.calls.end[row] - began) / 1e6 / steps
    graphs = np.unique(trace.device.graph)
    return Finding(
        rule="many_graph_sizes",
        claim=f"{len(ends)} CUDA graphs were captured in {steps} steps",
        evidence=(
            f"capturing takes {units.milliseconds(spent)} of a step",
            f"{int((graphs > 0).sum())} different graphs ran in these steps",
        ),
        remedy="pad inputs to few sizes, or leave compile.mode=reduce-overhead out",
        stake_ms=spent,
        why="a capture runs the step slowly once; a size that does not come again is not replayed",
        gain_ms=spent,
    )


def _calls(trace: Trace, part: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    named = np.array([part in text for text in trace.texts], dtype=bool)
    return np.flatnonzero(named[trace.calls.name])


RULE = check
