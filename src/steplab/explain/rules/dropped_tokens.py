"""The experts have room for fewer rows than the router gives out.

What it sees: a routing by top-k, and batched products over the experts with fewer rows.
Why it costs: what does not fit is dropped; those tokens skip the layer and learn nothing from it.
Remedy: a larger capacity factor, a balanced router, or dropless dispatch.
When it is wrong: drops that come from imbalance alone are not in the shapes, and not seen.
"""

from __future__ import annotations

from steplab import units
from steplab.explain.case import Case
from steplab.explain.experts import rooms, routing
from steplab.record import Finding


def check(case: Case) -> Finding | None:
    """Compare the experts' room with the assignments."""
    routed = routing(case.rows) if case.rows is not None else None
    if case.rows is None or routed is None:
        return None
    room = max(rooms(case.rows, routed).values(), default=0) * routed.experts
    if not room or room >= routed.assignments:
        return None
    lost = 1 - room / routed.assignments
    return Finding(
        rule="dropped_tokens",
        claim=f"at least {units.percent(lost)} of the assignments are dropped",
        evidence=(
            f"{routed.tokens:,} tokens x {routed.k} = {routed.assignments:,} rows are given out",
            f"{routed.experts} experts have room for {room:,}",
        ),
        remedy="raise the capacity factor, balance the router, or impl.experts=grouped",
        stake_ms=0.0,
        why="a dropped token skips the layer; it costs no time, but the model learns less",
    )


RULE = check
