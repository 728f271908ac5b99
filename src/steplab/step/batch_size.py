"""The batch size with the most tokens per second, found by doubling. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steplab.core import Run

MIN_GAIN = 1.02  # a batch is better only if it gives 2 % more: below it is mostly noise
PATIENCE = 2  # doublings without a gain before the search ends
MAX_BATCH = 2**16  # sequences; nothing that needs more has a step worth measuring


@dataclass(frozen=True)
class BatchSearch:
    """What was measured, and the smallest batch within 2 % of the fastest."""

    best: Run | None  # None: not even the first batch ran
    runs: tuple[Run, ...]
    reason: str  # why the search ended


def fastest_batch(
    measure: Callable[[int], Run], first: int = 1, most: int = MAX_BATCH
) -> BatchSearch:
    """Double the batch while it pays; where one does not fit, try half-way back.

    `measure(batch)` returns the Run of a step with that many sequences per micro-batch, whatever
    became of it. Of equals the smaller batch wins: it needs less memory.
    """
    runs: list[Run] = []
    best: Run | None = None
    without_gain, batch, reason = 0, first, f"{most} sequences are the most that is tried"
    while batch <= most:
        run = measure(batch)
        runs.append(run)
        if run.status != "ok":
            reason = f"{batch} sequences: {run.status}"
            between = batch * 3 // 4
            if best is not None and run.status == "oom" and between > best.spec.batch:
                runs.append(measure(between))
                best = _better(best, runs[-1])
            break
        leader = _better(best, run)
        without_gain = 0 if leader is run else without_gain + 1
        best, batch = leader, 2 * batch
        if without_gain >= PATIENCE:
            reason = f"no gain beyond {best.spec.batch} sequences"
            break
    return BatchSearch(best, tuple(runs), reason)


def _better(best: Run | None, run: Run) -> Run:
    if best is None:
        return run
    rates = [run.tokens_per_second or 0.0 if run.status == "ok" else 0.0 for run in (run, best)]
    return run if rates[0] > MIN_GAIN * rates[1] else best
