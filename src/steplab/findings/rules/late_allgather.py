"""Parameters are gathered only when they are needed.

What it sees: in the traces of all ranks, all-gathers most of whose transfer nothing hides, though
there is enough to compute in the step to hide it behind.
Why it costs: the layer waits for its weights, while the layer before could have computed meanwhile.
Remedy: gather the weights of the next layer while this one computes.
When it is wrong: the first gather of a step has nothing before it to hide behind.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.ranks.kinds import Kind

MOSTLY = 0.5  # of the transfer must be exposed
LEAST = 2  # a step: the first gather cannot come earlier


def check(case: Case) -> Finding | None:
    """Compare what is exposed of the all-gathers with what there is to compute."""
    late = late_gathers(case)
    if not late:
        return None
    exposed = late_ms(case)
    whole = sum(kind.transfer_ms for kind in late)
    return Finding(
        rule="late_allgather",
        claim=f"{units.milliseconds(exposed)} of {units.milliseconds(whole)} of all-gathers have "
        "nothing to hide behind: they begin when their result is needed",
        evidence=tuple(
            f"{kind.count:.0f} a step over {kind.size} ranks, {units.bytes_(kind.bytes)} each, "
            f"{units.percent(kind.exposed)} exposed"
            for kind in late
        ),
        remedy="gather ahead: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch "
        "of FSDP2, or async_op=True one layer early; without `reshard` weights are gathered once",
        stake_ms=exposed,
        why="a layer waits for its weights while the one before could have computed",
        gain_ms=exposed * (1 - 1 / sum(kind.count for kind in late)),
    )


def late_gathers(case: Case) -> list[Kind]:
    """Return the all-gathers that come late."""
    if case.ranks is None:
        return []
    computing = case.ranks.budget.typical.terms["kernels"]
    return [
        kind
        for kind in case.ranks.kinds
        if kind.kind == "all-gather"
        and kind.count >= LEAST
        and MOSTLY * kind.transfer_ms < kind.exposed_ms < computing
    ]


def late_ms(case: Case) -> float:
    """Return their transfer that nothing hides, per step."""
    return sum(kind.exposed_ms for kind in late_gathers(case))


RULE = check
