"""The step waits for its batch.

What it sees: more than 5 % of the step goes into waiting for a batch.
Why it costs: once the queue of launched work is empty, the device idles until the batch arrives.
Remedy: `prefetch`, which reads ahead in a thread and copies while the last step computes; a loop of
your own needs the same, from pinned memory.
When it is wrong: on CUDA without a trace, where fetching can overlap with work still queued.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case

SHARE = 0.05


def check(case: Case) -> Finding | None:
    """Compare the data wait with the step."""
    wait, step = _wait_ms(case), case.step_ms
    if not wait > SHARE * step:
        return None
    return Finding(
        rule="data_stall",
        claim=f"the step waits {units.milliseconds(wait)} for its batch",
        evidence=(f"data wait is {units.percent(wait / step)} of {units.milliseconds(step)}",),
        remedy="prefetch=2, or in your own loop batches read ahead in the background, pinned",
        stake_ms=wait,
        why="nothing computes until the batch is there",
        gain_ms=wait,
    )


def _wait_ms(case: Case) -> float:
    """Return the device's idle time while the host fetched; without a device, the host's wait."""
    clock = case.run.clock if case.run else None
    if case.on_device or clock is None or not clock.data_wait.values:
        return case.term_ms("data wait")
    return clock.data_wait.median


RULE = check
