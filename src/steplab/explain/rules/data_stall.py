"""The step waits for its batch.

What it sees: the host spends more than 5 % of the step's period fetching.
Why it costs: once the queue of launched work is empty, the device idles until the batch comes.
Remedy: read ahead in threads or processes, pin memory, copy while the last step computes.
When it is wrong: on CUDA a fetch can hide behind work still queued on the device.
"""

from __future__ import annotations

from steplab import units
from steplab.record import Finding, Run

SHARE = 0.05


def check(run: Run) -> Finding | None:
    """Compare the data wait with the step."""
    if run.clock is None or not run.clock.data_wait.values:
        return None
    wait, step = run.clock.data_wait.median, run.clock.step.median
    if wait <= SHARE * step:
        return None
    return Finding(
        rule="data_stall",
        claim=f"the step waits {units.milliseconds(wait)} for its batch",
        evidence=(f"data wait is {units.percent(wait / step)} of {units.milliseconds(step)}",),
        remedy="prefetch batches in the background and pin their memory",
        stake_ms=wait,
    )


RULE = check
