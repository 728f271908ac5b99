"""The card lowers its clock because the step draws as much power, or makes as much heat, as it may.

What it sees: the SM clock stays below the card's own maximum while the driver gives a reason, in
at least half of the readings during the timed steps.
Why it costs: tensor cores do as much per cycle as before, in fewer cycles per second.
Remedy: none in the step, so it is a note; figures of two machines are compared at equal clocks.
When it is wrong: windows shorter than a second, whose readings also cover what ran before.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.categories import ATTENTION, MATMUL


def check(case: Case) -> Finding | None:
    """Compare the SM clock with its maximum, where something held it back."""
    counters = case.run.counters if case.run is not None else None
    if counters is None or not counters.held_clock:
        return None
    computing_ms = 0.0
    if case.rows is not None:  # the clock bounds these; memory has a clock of its own
        computing = case.rows.labeled("category", lambda name: name.startswith((MATMUL, ATTENTION)))
        computing_ms = case.rows.ms(computing)
    lost_ms = computing_ms * (1 - counters.clock_share)
    costs = f", which costs products and attention {units.milliseconds(lost_ms)}" if lost_ms else ""
    reasons = (f"{name} in {units.percent(one)}" for name, one in counters.held_back.items())
    return Finding(
        rule="power_bound",
        claim=f"{counters.held_clock}{costs}",
        evidence=(f"of the driver's readings: {', '.join(reasons)}",),
        remedy="compare with other machines at equal clocks",
        stake_ms=lost_ms,
        why="tensor cores do as much per cycle as before, in fewer cycles per second",
        gain_ms=0.0,
    )


RULE = check
