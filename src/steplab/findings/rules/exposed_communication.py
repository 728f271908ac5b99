"""Communication runs while nothing computes.

What it sees: communication kernels that run while no other kernel does.
Why it costs: the device could compute while the network carries gradients.
Remedy: start the reduction of each bucket as soon as its gradients are ready, on its own stream.
When it is wrong: the last bucket of a backward pass has nothing left to overlap with.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case


def check(case: Case) -> Finding | None:
    """Take the term of the budget, and report how much communication there is in all."""
    exposed = case.term_ms("communication")
    if case.rows is None or not exposed:
        return None
    mask = case.rows.category("communication")
    whole = max(exposed, case.rows.ms(mask))  # which counts by the step that launched it
    groups = case.rows.totals("name", mask)
    return Finding(
        rule="exposed_communication",
        claim=f"{units.milliseconds(exposed)} of {units.milliseconds(whole)} communication "
        "have nothing to hide behind",
        evidence=tuple(f"{g.label}: {g.count:.0f}, {units.milliseconds(g.ms)}" for g in groups),
        remedy="reduce gradients bucket by bucket during backward, on a stream of their own",
        stake_ms=exposed,
        why="the device waits for the network instead of computing meanwhile",
        gain_ms=exposed,
    )


RULE = check
