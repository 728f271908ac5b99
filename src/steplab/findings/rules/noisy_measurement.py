"""The samples spread too far to show small differences.

What it sees: the middle half of the samples spans more than 10 % of the median.
Why it costs: a change smaller than the spread can neither be seen nor ruled out.
Remedy: more steps, a quiet machine, or two Runs measured in turns (`compare A B --rerun`), which a
loop of your own cannot be: there `compare A B` says what two Runs can tell.
When it is wrong: steps that truly differ (ragged batches) spread as well.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case

MAX_SPREAD = 0.10
IN_TURNS = (
    "measure more steps on a quiet machine, or two Runs in turns: steplab compare A B --rerun"
)
IN_OWN_LOOP = (
    "measure on a quiet machine; steplab compare A B says what two Runs of your loop can tell"
)


def check(case: Case) -> Finding | None:
    """Look at the spread of the step's samples."""
    if case.run is None or case.run.clock is None:
        return None
    step = case.run.clock.step
    if not step.spread > MAX_SPREAD:
        return None
    low, high = step.percentile(25), step.percentile(75)
    return Finding(
        rule="noisy_measurement",
        claim=f"the middle half of the {len(step)} samples spans {units.percent(step.spread)}",
        evidence=(f"{units.milliseconds(low)} to {units.milliseconds(high)}", *step.marks.values()),
        remedy=IN_OWN_LOOP if case.of_own_loop else IN_TURNS,
        stake_ms=0.0,
        why="a change smaller than the spread can neither be seen nor ruled out",
    )


RULE = check
