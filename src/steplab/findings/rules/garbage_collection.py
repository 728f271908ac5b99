"""Python's garbage collector runs in the steps.

What it sees: the time that the collector took while the clock ran, above 3 % of the step, and the
line at which it struck: where it is called, or where so many objects are made that it is due.
Why it costs: a full collection looks at every object that Python holds, and nothing is launched
meanwhile.
Remedy: `gc.collect()` between epochs only; `gc.freeze()` after the start, or `gc.disable()` and a
collection every N steps. Where one line makes the objects: fewer of them.
When it is wrong: cycles hold tensors on the device, and only the collector frees them.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.analysis import UNATTRIBUTED

SHARE = 0.03
FEWER = "make fewer objects at that line, or do it every N steps; "


def check(case: Case) -> Finding | None:
    """Compare the collector's time with the step."""
    spent = case.collector_ms
    if not spent > SHARE * case.step_ms:
        return None
    struck = _struck(case)
    return Finding(
        rule="garbage_collection",
        claim=f"Python's garbage collector takes {units.milliseconds(spent)} of a step",
        evidence=("counted in the timed steps", *(struck or _lines(case, spent))),
        remedy=f"{FEWER if struck else ''}no gc.collect() in the step; gc.freeze() after the "
        "start, or gc.disable() and a collection every N steps",
        stake_ms=spent,
        why="it looks at every object that Python holds, and nothing is launched meanwhile",
        gain_ms=spent,
    )


def _struck(case: Case) -> list[str]:
    """Return the line at which the collector struck for more than half of its time."""
    clock = case.run.clock if case.run is not None else None
    if clock is None or not clock.collector_ms:
        return []
    shares = {line: ms / clock.collector_ms for line, ms in clock.collector_lines.items()}
    return [
        f"{units.percent(share)} of it strikes at {line}{case.called_at(line)}"
        for line, share in shares.items()
        if share > 0.5
    ]


def _lines(case: Case, spent: float) -> list[str]:
    """Return the line that the host is at meanwhile, as it is with gc.collect()."""
    lines = [line for line, ms in case.silent_lines("python", "operator") if ms > spent / 2]
    return [f"at {line}" for line in lines if line != UNATTRIBUTED]


RULE = check
