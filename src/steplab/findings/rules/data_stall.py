"""The step waits for its batch.

What it sees: more than 5 % of the step goes into waiting for a batch: in ranges of the loader, or
in Python of a loader in a loop of one's own, which the stack shows.
Why it costs: once the queue of launched work is empty, the device idles until the batch arrives.
Remedy: `prefetch`, which reads ahead in a thread and copies while the last step computes; a loop of
your own needs the same, from pinned memory. A loader that has workers already needs more of them.
When it is wrong: on CUDA without a trace, where fetching can overlap with work still queued.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.budget import data_ranges
from steplab.trace.silences import fetching_lines

SHARE = 0.05
SHOWN = 2
BURSTS, MIN_SAMPLES = 0.15, 8  # of the mean step
SLOW_WORKERS = (
    "make each sample cheaper or give the loader more workers: those it has are slower than the "
    "step"
)


def check(case: Case) -> Finding | None:
    """Compare the data wait with the step."""
    wait, step = _wait_ms(case), case.step_ms
    lines = _lines(case)
    if not wait > SHARE * step:
        return _bursts(case, lines)
    at = f" ({lines[0]})" if lines else ""
    return Finding(
        rule="data_stall",
        claim=f"the step waits {units.milliseconds(wait)} for its batch{at}",
        evidence=(
            f"data wait is {units.percent(wait / step)} of {units.milliseconds(step)}",
            *(f"fetched at {line}" for line in lines[:SHOWN]),
        ),
        remedy=_remedy(case),
        stake_ms=wait,
        why="nothing computes until the batch is there",
        gain_ms=wait,
    )


def _remedy(case: Case) -> str:
    """Return how batches come ahead of time; pinned memory only where there is a device."""
    if _has_workers(case):
        return SLOW_WORKERS
    on_cpu = case.run.spec.device == "cpu" if case.run is not None else not case.on_device
    workers = "num_workers=2, persistent_workers=True"
    if on_cpu:
        return f"prefetch=2; in a loop of your own DataLoader(..., {workers})"
    return (
        f"prefetch=2; in a loop of your own DataLoader(..., {workers}, pin_memory=True), and "
        "copies with non_blocking=True"
    )


def _bursts(case: Case, lines: list[str]) -> Finding | None:
    """Judge workers that are slower than the step: some steps wait for long, others not at all."""
    clock = case.run.clock if case.run is not None else None
    if clock is None or len(clock.step) < MIN_SAMPLES or not _uses_loader(case):
        return None
    lost = clock.step.mean - clock.step.median
    settled = clock.step.values[len(clock.step) // 3 :]  # the first may be warm-up
    slow = sum(ms > 2 * clock.step.median for ms in settled)
    if lost < BURSTS * clock.step.mean or slow < 2:
        return None
    return Finding(
        rule="data_stall",
        claim=f"{slow} of {len(clock.step)} steps wait for their batch, "
        f"{units.milliseconds(lost)} on average",
        evidence=(
            f"half of the steps take {units.milliseconds(clock.step.median)}, "
            f"the mean is {units.milliseconds(clock.step.mean)}",
            *(f"fetched at {line}" for line in lines[:SHOWN]),
        ),
        remedy=SLOW_WORKERS,
        stake_ms=lost,
        why="workers fill their queue while the step computes, and it runs empty again and again",
        gain_ms=lost,
    )


def _uses_loader(case: Case) -> bool:
    """Whether the step takes its batches from torch's DataLoader, which may have workers."""
    if case.analysis is None:
        return False
    trace = case.analysis.detail or case.analysis.trace
    return bool(trace.named(trace.python, lambda name: "torch/utils/data/" in name).any())


def _has_workers(case: Case) -> bool:
    """Whether torch's DataLoader fetches by processes of its own, as its range says."""
    if case.analysis is None:
        return False
    trace = case.analysis.trace
    return bool(trace.named(trace.ranges, lambda name: "_MultiProcessingDataLoader" in name).any())


def _wait_ms(case: Case) -> float:
    """Return the wait by the trace, as the budget shows it; without a trace, the host's wait."""
    if case.rows is not None:
        in_ranges = case.term_ms("data wait")
        if not case.on_device:  # operators that make the batch are a part of the wait, too
            in_ranges = in_ranges * case.rows.scale + case.rows.ms(
                case.rows.labeled("phase", lambda label: label == "data")
            )
        return in_ranges + case.silent_ms("data")
    clock = case.run.clock if case.run else None
    return clock.data_wait.median if clock is not None and clock.data_wait.values else 0.0


def _lines(case: Case) -> list[str]:
    """Return the lines of the loader: those inside its ranges, or those of silences.

    The longer wait first.
    """
    silent = [line for line, _ in case.silent_lines("data") if line != UNATTRIBUTED]
    if case.analysis is None:
        return silent
    source = case.analysis.detail or case.analysis.trace
    ranged = fetching_lines(source, data_ranges(source)) if len(source.python) else []
    in_ranges = case.term_ms("data wait") > case.silent_ms("data")
    return list(dict.fromkeys((ranged + silent) if in_ranges else (silent + ranged)))


RULE = check
