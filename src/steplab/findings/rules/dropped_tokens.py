"""The experts have room for fewer rows than the router assigns.

What it sees: the share of dropped assignments that the step reported (`dropped`); without that, a
top-k routing and batched products over the experts with fewer rows than were assigned.
Why it costs: what does not fit is dropped; those tokens skip the layer and it learns nothing from
them.
Remedy: a larger capacity factor, a balanced router, or dropless dispatch.
When it is wrong: drops caused by imbalance alone do not show in shapes; a step that reports nothing
hides them.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.matmuls import expert_capacities, routing

# A capacity chosen on purpose drops a few when the router fluctuates.
TOLERATED = 0.01


def check(case: Case) -> Finding | None:
    """Take the reported drops, else compare the capacity of the experts with the assignments."""
    reported = case.dropped_share
    if reported is None:
        return _by_shapes(case)
    if not reported > TOLERATED:
        return None
    return _dropped(case, units.percent(reported), ("as the step itself reported",))


def _by_shapes(case: Case) -> Finding | None:
    routed = routing(case.rows) if case.rows is not None else None
    if case.rows is None or routed is None:
        return None
    room = max(expert_capacities(case.rows, routed).values(), default=0) * routed.experts
    if not room or room >= routed.assignments:
        return None
    evidence = (
        f"{routed.tokens:,} tokens x {routed.k} = {routed.assignments:,} rows are given out",
        f"{routed.experts} experts have room for {room:,}",
    )
    share = f"at least {units.percent(1 - room / routed.assignments)}"
    return _dropped(case, share, evidence)


def _dropped(case: Case, share: str, evidence: tuple[str, ...]) -> Finding:
    grouped = "impl.experts=grouped" if case.dispatches("experts") else "torch._grouped_mm"
    dropless = f"give every expert the rows that it gets ({grouped})"
    return Finding(
        rule="dropped_tokens",
        claim=f"{share} of the assignments are dropped",
        evidence=evidence,
        remedy=f"raise the capacity factor, balance the router, or {dropless}",
        stake_ms=0.0,
        why="a dropped token skips the layer; it costs no time, but the model learns less",
    )


RULE = check
