"""CUDA graphs are captured again for every new size of input.

What it sees: graphs that are still being captured in the profiled steps.
Why it costs: a new size runs once without a graph and is captured the second time, with kernels
launched one by one; a size that occurs only once or twice is never replayed.
Remedy: pad inputs to few sizes, so that the same graphs are replayed.
When it is wrong: the profile began before all sizes had occurred once.
"""

from __future__ import annotations

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case


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
    return Finding(
        rule="many_graph_sizes",
        claim=f"{len(spent)} CUDA graphs were captured in {steps} steps",
        evidence=(
            f"capturing takes {units.milliseconds(capturing)} of a step",
            f"the device waits {units.milliseconds(waited)} of a step for launches",
            f"{int((graphs > 0).sum()) or 'no'} different graphs ran in these steps",
        ),
        remedy="pad inputs to few sizes, or leave compile.mode=reduce-overhead out",
        stake_ms=stake,
        why="a capture runs the step slowly once; a size that does not come again is not replayed",
        gain_ms=stake,
    )


RULE = check
