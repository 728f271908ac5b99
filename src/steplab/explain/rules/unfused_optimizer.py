"""The optimizer updates tensor by tensor or op by op.

What it sees: an update that is not fused and takes more than 3 % of the step.
Why it costs: every op reads and writes all weights and states once more than one kernel would.
Remedy: `optimizer=fused`.
When it is wrong: an optimizer that has no fused implementation.
"""

from __future__ import annotations

from steplab import units
from steplab.record import Finding, Run

SHARE = 0.03


def check(run: Run) -> Finding | None:
    """Compare the optimizer's phase with the step."""
    if run.clock is None or run.ran is None or run.ran.optimizer in ("", "fused"):
        return None
    phase = run.clock.phases.get("optimizer")
    if phase is None or phase.median <= SHARE * run.clock.step.median:
        return None
    share = units.percent(phase.median / run.clock.step.median)
    return Finding(
        rule="unfused_optimizer",
        claim=f"the {run.ran.optimizer} update takes {units.milliseconds(phase.median)}",
        evidence=(f"{share} of the step",),
        remedy="optimizer=fused",
        stake_ms=phase.median,
    )


RULE = check
