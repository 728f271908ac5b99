"""Weights or averages are computed anew and then copied over the old ones.

What it sees: elementwise operators whose only use is a copy over a tensor that is older than the
step, as the Run recorded the flow of values: a moving average that goes through `state_dict` and
`load_state_dict`, `w.copy_(w - lr * g)`.
Why it costs: every operator reads and writes a whole tensor and asks for new memory; in place, one
operator reads two tensors and writes one.
Remedy: one operator in place (`lerp_`, `add_`), over all tensors at once (`torch._foreach_lerp_`).
When it is wrong: no operator in place computes the same.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.core.dataflow import COPIED_OVER
from steplab.findings.case import Case
from steplab.findings.claims import Claim

SHARE = 0.02
COPY = "aten::copy_"
IN_PLACE = 3  # passes over a tensor: two reads, one write


def check(case: Case) -> Finding | None:
    """Compare the passes of such chains with those of one operator in place."""
    rows = case.rows
    if rows is None:
        return None
    mask = case.verdict(COPIED_OVER)
    calls = rows.asked_calls(mask)
    copies, spent = calls[COPY], case.cost_ms(mask)
    if not copies or not spent > SHARE * case.step_ms:
        return None
    # An operator of one tensor makes two passes, one of two tensors three: a chain, two each and
    # one more.
    each = calls.total() / copies
    passes = 2 * each + 1
    return Claim(
        rule="copied_over",
        claim=f"{copies} tensors are computed anew and copied over the old ones: "
        f"{units.milliseconds(spent)} a step",
        evidence=(f"{each:.1f} operators for each of them", *rows.hot_lines(mask)),
        remedy="in place: torch._foreach_lerp_(averages, weights, 1 - decay) for a moving average, "
        "w.add_(g, alpha=-lr) for an update; load_state_dict() only to load a checkpoint",
        stake_ms=spent,
        why="every operator reads and writes the whole tensor, in memory that is new each time",
        gain_ms=spent * max(0.0, 1 - IN_PLACE / passes),
        work=mask,
    )


RULE = check
