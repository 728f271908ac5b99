"""The host of a sharded step cannot keep up with its own gathering.

What it sees: idle time of the device while the host was in FSDP's own ranges; on a CPU, time in
them that is neither a collective nor an operator of more than 10 us, which is what a call costs.
10 % of the step or more.
Why it costs: every block that is gathered apart costs the host about 4 ms of Python a step, and of
those a part for every parameter.
Remedy: gather several blocks together, gather less often, put small parameters together, or give
the device more to do.
When it is wrong: under the profiler Python is slower than without it; a small excess may be that.
"""

from __future__ import annotations

import statistics

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.analysis import Analysis
from steplab.trace.budget import device_terms, host_communication
from steplab.trace.spans import Intervals, nest, union
from steplab.trace.windows import borders

SHARDING = "FSDP::"  # how the ranges of fully_shard begin
SHARE = 0.10  # of the step
CALL = 10_000  # ns that the call of an operator takes, whatever it does


def check(case: Case) -> Finding | None:
    """Measure the idle time inside the ranges of fully_shard."""
    if case.analysis is None or case.rows is None:
        return None
    ranges, trace = case.analysis.trace.ranges, case.analysis.trace
    is_sharding = trace.named(ranges, lambda name: name.startswith(SHARDING))
    if not is_sharding.any():
        return None
    inside = union(ranges.start[is_sharding], ranges.end[is_sharding]) & _idle(case.analysis)
    low, high = borders(case.analysis.windows)
    idle = statistics.median((inside.within(low, high) / 1e6).tolist()) * case.rows.scale
    if not idle > SHARE * case.step_ms:
        return None
    count = float(is_sharding.sum()) / len(case.analysis.windows)
    blocks = np.count_nonzero(trace.named(ranges, lambda name: "::post_backward_reduce" in name))
    return Finding(
        rule="host_bound_sharding",
        claim=f"{units.milliseconds(idle)} of the step wait for the host to shard and gather",
        evidence=(
            f"{count:.0f} ranges of FSDP a step, "
            f"{blocks / len(case.analysis.windows):.0f} blocks are reduced apart",
            f"{units.milliseconds(idle / max(count, 1))} of idle time in each",
        ),
        remedy="gather several blocks together (`together` of parallel=fsdp), keep them after the "
        "forward (no `reshard`), put small parameters into one, take a larger batch, or compile "
        "the blocks",
        stake_ms=idle,
        why="every block that is gathered apart costs the host milliseconds of Python, and every "
        "parameter a part of them",
        gain_ms=idle,
    )


def _idle(analysis: Analysis) -> Intervals:
    """Return when the device waited for launches; on a CPU, when neither op nor collective worked.

    There, most operators of FSDP are views and copies of one small parameter, inside others.
    """
    trace, ops = analysis.trace, analysis.trace.ops
    if len(trace.device):
        return device_terms(trace, analysis.windows, analysis.work, analysis.syncs)["launch"]
    parents = nest(ops).parents()
    works = ops.duration >= CALL
    works[parents[parents >= 0]] = False
    whole = union(*borders(analysis.windows))
    return whole - union(ops.start[works], ops.end[works]) - host_communication(trace)


RULE = check
