"""CUDA graphs are captured again for every new size of input.

What it sees: graphs that are still being captured in the profiled steps.
Why it costs: a new size runs once without a graph and is captured the second time, with kernels
launched one by one; a size that occurs only once or twice is never replayed.
Remedy: pad inputs to few sizes, so that the same graphs are replayed.
When it is wrong: the profile began before all sizes had occurred once. Captures in one step only,
or in a recording without steps, are no evidence of many sizes: record later.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.silences import captures
from steplab.trace.windows import step_at

AGAIN = "pad inputs to few sizes, or leave compile.mode=reduce-overhead out"
ONCE = "record steps after the capture: this recording shows no steady state"


def check(case: Case) -> Finding | None:
    """Take the cost of the captures, or all waiting for launches, which replays would not need."""
    spent = case.capture_ms
    if not spent or case.rows is None or case.analysis is None:
        return None
    steps = case.rows.steps
    capturing = sum(spent) / steps
    waited = case.launch_wait_ms + case.silent_ms("capturing")
    stake = max(capturing, waited)
    graphs = np.unique(case.analysis.trace.device.graph)
    begun = captures(case.analysis.trace).start
    often = len(np.unique(step_at(case.analysis.windows, begun))) > 1
    what = f"{len(spent)} graphs were" if len(spent) > 1 else "a graph was"
    where = f"in {steps} steps" if steps > 1 else "in the recording"
    return Finding(
        rule="many_graph_sizes",
        claim=f"{what} captured {where}",
        evidence=(
            f"capturing takes {units.milliseconds(capturing)} of a step",
            f"the device waits {units.milliseconds(waited)} of a step for launches",
            f"{int((graphs > 0).sum()) or 'no'} different graphs ran in these steps",
        ),
        remedy=AGAIN if often else ONCE,
        stake_ms=stake,
        why="a capture runs the step slowly once; a size that does not come again is not replayed",
        gain_ms=stake if often else None,
    )


RULE = check
