"""Communication runs while nothing computes.

What it sees: communication kernels that run while no other kernel does.
Why it costs: the device could compute while the network carries gradients.
Remedy: by what is sent. Gradients: reduce each bucket as soon as it is ready, on its own stream, or
where that is done already, send less. Weights: gather those of the next layer ahead. Rows that are
exchanged: compute one half of the batch while the other travels.
When it is wrong: the last bucket of a backward pass has nothing left to overlap with; and a rank
that is late makes the others wait here.
"""

from __future__ import annotations

import re

from steplab.core import Finding, units
from steplab.findings.case import Case

EXCHANGES = re.compile(r"SendRecv|all_?to_?all|ep::inter|ep::intra|recv", re.IGNORECASE)
GATHERS = re.compile(r"all_?gather", re.IGNORECASE)
BUCKETED = "DistributedDataParallel."


def check(case: Case) -> Finding | None:
    """Take the term of the budget, and report how much communication there is in all."""
    exposed = case.term_ms("communication")
    if case.rows is None or not exposed:
        return None
    mask = case.rows.category("communication")
    whole = max(exposed, case.rows.ms(mask))  # which counts by the step that launched it
    groups = case.rows.totals("name", mask)
    sent = " ".join(g.label for g in groups[:1] + case.rows.totals("op", mask, 1))
    return Finding(
        rule="exposed_communication",
        claim=f"{units.milliseconds(exposed)} of {units.milliseconds(whole)} communication "
        "have nothing to hide behind",
        evidence=tuple(f"{g.label}: {g.count:.0f}, {units.milliseconds(g.ms)}" for g in groups),
        remedy=_remedy(case, sent),
        stake_ms=exposed,
        why="the device waits for the network, or for the rank that comes last, and does not "
        "compute meanwhile",
        gain_ms=exposed,
    )


def _remedy(case: Case, sent: str) -> str:
    """Return what would hide or shorten what is sent most; `sent` names kernel and operator."""
    assert case.rows is not None and case.analysis is not None
    if EXCHANGES.search(sent):
        return "compute one half of the batch while the rows of the other are sent"
    if GATHERS.search(sent):
        return "gather the weights of the next layer while this one computes"
    if not case.rows.labeled("phase", lambda label: label in ("backward", "optimizer")).any():
        return "larger batches, fewer ranks to a layer, or another batch that computes meanwhile"
    ranges = case.analysis.trace.ranges
    if case.analysis.trace.named(ranges, lambda name: name.startswith(BUCKETED)).any():
        return (
            "fewer bytes (gradients in bf16, accumulation over several batches): they are sent in "
            "buckets during backward already; if one rank is slower, look there"
        )
    return "reduce gradients bucket by bucket during backward, on a stream of their own"


RULE = check
