"""The step waits for its batch.

What it sees: more than 5 % of the step goes into waiting for a batch: in torch's DataLoader, as the
clock saw it in steps without a profiler; in ranges of the loader, or in Python of a loader in a
loop of one's own, which the stack shows. Of workers, the lines in which one more of them, asked for
one more batch, spends its time.
Why it costs: once the queue of launched work is empty, the device idles until the batch arrives.
Remedy: `prefetch`, which reads ahead in a thread and copies while the last step computes, with its
`workers` where the loader has none; a loop of your own needs the same, from pinned memory. A loader
that has workers already needs more of them, or a collate_fn that returns tensors: arrays go
through a pipe. Where each batch is the first of an epoch of its own, `next(iter(loader))`: one
iterator for the whole epoch.
When it is wrong: on CUDA without a trace, where fetching can overlap with work still queued. On a
CPU workers hand a batch over in about 1 ms: a note where they save less than 5 % of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.budget import data_ranges
from steplab.trace.silences import fetching_lines

SHARE = 0.05
SHOWN = 2
BURSTS, MIN_SAMPLES = 0.15, 8  # of the mean step
# Bytes of a batch. A pipe moves some 1 GB/s, and the loop's process unpickles while it computes.
PIPED = 2**20
# What a batch takes that a worker has ready: 0.8 to 1.1 ms on two slow cores, 0.07 to 0.14 beside
# an H200.
HANDOVER_MS, HANDOVER_BESIDE_GPU_MS = 1.0, 0.2
# Ranges of a DataLoader have the name of its iterator's class.
SINGLE, MULTIPLE = "_SingleProcessDataLoader", "_MultiProcessingDataLoader"
LEFT_EPOCHS = 0.5  # for each batch: one less than batches, of which few may have been timed
ONE_ITERATOR = (
    "keep one iterator for the epoch: batches = iter(loader) before the loop, next(batches) in it, "
    "and a new one when it ends; next(iter(loader)) draws the order of all rows for one batch"
)
SLOW_WORKERS = (
    "make each sample cheaper or give the loader more workers: those it has are slower than the "
    "step"
)


def check(case: Case) -> Finding | None:
    """Compare the data wait with the step."""
    wait, step = _wait_ms(case), case.step_ms
    lines = _lines(case)
    if not wait > SHARE * step or (_has_workers(case) and wait < _ready_ms(case)):
        return _bursts(case, lines)
    gain = wait - _handover_ms(case, wait)
    at, asking = _at([*_worker_lines(case), *lines]), _asking_lines(case)
    fetching = [line for line in lines if line not in asking][:SHOWN]
    return Finding(
        rule="data_stall",
        claim=f"the step waits {units.milliseconds(wait)} for its batch{at}",
        evidence=(
            f"data wait is {units.percent(wait / step)} of {units.milliseconds(step)}",
            *_loader(case),
            *(f"asked for at {line}" for line in asking),
            *(f"fetched at {line}{case.called_at(line, asking)}" for line in fetching),
        ),
        remedy=_remedy(case),
        stake_ms=wait,
        why="nothing computes until the batch is there",
        gain_ms=gain,
        ordinary=gain < SHARE * step,
    )


def _remedy(case: Case) -> str:
    """Return how batches come ahead of time; pinned memory only where there is a device."""
    if _leaves_epochs(case):
        return ONE_ITERATOR
    if _piped_bytes(case) > PIPED:
        return (
            "let the collate_fn of the loader return tensors (torch.stack, or default_collate): "
            "they lie in shared memory, where pin_memory=True finds them; then more workers"
        )
    if _has_workers(case):
        return SLOW_WORKERS
    loader = "fetch in other processes: DataLoader(..., num_workers=2, persistent_workers=True"
    loader += ")" if _on_cpu(case) else ", pin_memory=True), and copies with non_blocking=True"
    if case.of_own_loop:
        return loader
    recipe = "prefetch.workers=2" if _has_range(case, SINGLE) else "prefetch=2"
    return f"{recipe}; in a loop of your own {loader}"


def _handover_ms(case: Case, wait: float) -> float:
    """Return what is left of the wait once workers fetch: on a CPU it counts."""
    return min(wait, HANDOVER_MS) if _on_cpu(case) and not _has_workers(case) else 0.0


def _ready_ms(case: Case) -> float:
    """Return what taking over a batch may take that is ready."""
    return HANDOVER_MS if _on_cpu(case) else HANDOVER_BESIDE_GPU_MS


def _on_cpu(case: Case) -> bool:
    return case.run.spec.device == "cpu" if case.run is not None else not case.on_device


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
        f"{units.milliseconds(lost)} on average{_at([*_worker_lines(case)])}",
        evidence=(
            f"half of the steps take {units.milliseconds(clock.step.median)}, "
            f"the mean is {units.milliseconds(clock.step.mean)}",
            *_in_workers(case),
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
    """Whether torch's DataLoader fetches by processes of its own."""
    clock = case.run.clock if case.run is not None else None
    if clock is not None and clock.loader is not None:
        return clock.loader.workers > 0
    return _has_range(case, MULTIPLE)


def _has_range(case: Case, kind: str) -> bool:
    """Whether a DataLoader of that kind was read."""
    if case.analysis is None:
        return False
    trace = case.analysis.trace
    return bool(trace.named(trace.ranges, lambda name: kind in name).any())


def _loader(case: Case) -> list[str]:
    """Return what is known of torch's DataLoader, and where one is made."""
    made = [f"a DataLoader is made at {line}" for line in case.setup_lines("DataLoader")]
    if _leaves_epochs(case):
        return ["an epoch is begun for each batch, and left after it", *made]
    if _piped_bytes(case) > PIPED:
        size = units.bytes_(_piped_bytes(case))
        given = [f"a collate_fn is given at {line}" for line in case.setup_lines("collate_fn")]
        return [
            f"the workers pickle {size} of each batch and send it through a pipe",
            *given,
            *made,
        ]
    if _has_range(case, SINGLE):
        return ["the loader has no workers (num_workers=0)", *made]
    return [*_in_workers(case), *made] if _has_workers(case) else []


def _in_workers(case: Case) -> list[str]:
    return [
        f"a worker is at {line} for {units.percent(share)} of its time"
        for line, share in _worker_lines(case).items()
    ]


def _worker_lines(case: Case) -> Mapping[str, float]:
    """Return the lines that workers are in while they make a batch, with their shares of it."""
    clock = case.run.clock if case.run is not None else None
    return clock.loader.lines if clock is not None and clock.loader is not None else {}


def _at(lines: list[str]) -> str:
    """Return the first of them, as the end of a sentence."""
    return f" ({lines[0]})" if lines else ""


def _leaves_epochs(case: Case) -> bool:
    """Whether each batch is the first of an epoch, which is left after it."""
    clock = case.run.clock if case.run is not None else None
    loader = clock.loader if clock is not None else None
    return loader is not None and loader.left_epochs >= LEFT_EPOCHS


def _piped_bytes(case: Case) -> int:
    clock = case.run.clock if case.run is not None else None
    return clock.loader.piped_bytes if clock is not None and clock.loader is not None else 0


def _wait_ms(case: Case) -> float:
    """Return the wait in torch's DataLoader by the clock, else that of the trace.

    Workers fill their queue while a recording starts, so that the recorded steps wait for less.
    """
    clock = case.run.clock if case.run is not None else None
    timed = clock.data_wait.median if clock is not None and clock.loader is not None else 0.0
    wait = timed if timed > SHARE * case.step_ms else _traced_wait_ms(case)
    # The host may wait while the device still works: it is lost where the device idles.
    return max(0.0, min(wait, case.step_ms - case.busy_ms)) if case.on_device else wait


def _traced_wait_ms(case: Case) -> float:
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


def _asking_lines(case: Case) -> list[str]:
    """Return the lines that ask a loader for its next batch: where its ranges begin."""
    if case.analysis is None or case.rows is None:
        return []
    source = case.analysis.detail or case.analysis.trace
    return case.rows.lines_at(data_ranges(source).start)


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
