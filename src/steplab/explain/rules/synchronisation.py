"""The host waits for the device in the middle of a step.

What it sees: calls that wait for the device (`.item()`, `.nonzero()`, copies to the host), and
the time in which the device then had nothing to do.
Why it costs: the host loses its head start; the device idles until new work is launched.
Remedy: keep the value on the device, read it every N steps, or copy it without blocking.
When it is wrong: a wait that is meant to be there, such as the end of a benchmark.
"""

from __future__ import annotations

from collections import defaultdict

from steplab import units
from steplab.explain.case import Case
from steplab.record import Finding
from steplab.trace.analysis import UNATTRIBUTED

SHOWN = 5


def check(case: Case) -> Finding | None:
    """Add up the idle time that each waiting line caused."""
    if case.rows is None or not case.on_device:
        return None
    assert case.analysis is not None
    syncs, labels, steps = case.analysis.syncs, case.rows.work.labels, case.rows.steps
    idle: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], float] = defaultdict(float)
    for row in ((syncs.step >= 0) & (syncs.idle > 0)).nonzero()[0]:
        op, line = labels[syncs.op[row]], labels[syncs.line[row]]
        place = (op if op != UNATTRIBUTED else labels[syncs.call[row]], line)
        idle[place] += float(syncs.idle[row]) / 1e6 / steps
        counts[place] += 1 / steps
    if not idle:
        return None
    total = sum(idle.values())
    places = sorted(idle, key=lambda place: -idle[place])
    evidence = [
        f"{op} at {line}: {counts[op, line]:.3g} a step, {units.milliseconds(idle[op, line])} idle"
        for op, line in places[:SHOWN]
    ]
    return Finding(
        rule="synchronisation",
        claim=f"{sum(counts.values()):.3g} times a step the host waits and the device runs dry",
        evidence=tuple(evidence),
        remedy=f"keep the value of {places[0][0]} on the device, or read it every N steps",
        stake_ms=total,
        why="after each wait the device idles until the host has launched new work",
        gain_ms=total,
    )


RULE = check
