"""The first steps are slower than the rest and were measured with them.

What it sees: one or more samples at the beginning that take twice as long as the steady ones; in a
trace, launches of 0.3 ms and more, each the first of its kernel, for which the device waits.
Why it costs: the mean, and with many of them the median, include start-up that training lacks. The
driver loads a kernel's module at its first launch; memory is taken from it then, too.
Remedy: more warm-up steps; a recording that begins after them.
When it is wrong: the machine was busy just then; where others are known to have used it, or where
the steps compiled (recompiles), nothing is said.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case

SLOW = 2.0  # times the median of the steady samples
ALONE = 5.0  # times: a single sample below may well be chance, and is a note
MIN_SAMPLES = 4


def check(case: Case) -> Finding | None:
    """Look for a slow beginning among the timed steps, else among the profiled ones."""
    if _otherwise_explained(case):
        return None
    return _slow_steps(case) or _cold_recording(case)


def _slow_steps(case: Case) -> Finding | None:
    samples = _samples(case)
    count = slow_beginning(samples)
    if not count:
        return None
    steady = statistics.fmean(samples[count:])
    excess, warmup = statistics.fmean(samples) - steady, _warmup(case) + count
    first = ", ".join(units.milliseconds(value) for value in samples[:count][:3])
    return Finding(
        rule="warmup_counted",
        claim=f"the first {count} of {len(samples)} steps are warm-up and were counted",
        evidence=(f"{first}, then {units.milliseconds(steady)}",),
        remedy=f"steplab.profile(step, warmup={warmup})"
        if case.of_own_loop
        else f"--warmup {warmup} or more",
        stake_ms=excess,
        why=f"they add {units.milliseconds(excess)} to the mean step that training will not see",
        gain_ms=excess,
        ordinary=count == 1 and samples[0] < ALONE * steady,
    )


def _cold_recording(case: Case) -> Finding | None:
    """Judge what a recorded step takes because its kernels and its memory are new."""
    if not case.loading_ms or case.analysis is None:
        return None
    silences, labels = case.analysis.silences, case.analysis.work.labels
    loads = silences.cause == labels.index("loading")
    longest = float((silences.end - silences.start)[loads].max()) / 1e6
    evidence = [
        f"{np.count_nonzero(loads)} kernels at their first launch: "
        f"{units.milliseconds(case.loading_ms)}, the longest {units.milliseconds(longest)}"
    ]
    if case.driver_memory_ms:
        evidence.append(f"memory of the driver: {units.milliseconds(case.driver_memory_ms)}")
    lost = min(case.loading_ms + case.driver_memory_ms, case.step_ms - case.busy_ms)
    return Finding(
        rule="warmup_counted",
        claim=f"kernels are loaded while the recording runs: {units.milliseconds(lost)} a step",
        evidence=tuple(evidence),
        remedy="record after a warm-up step, as by torch.profiler.schedule(wait=1, warmup=1, "
        "active=3) with profiler.step() after each step",
        stake_ms=lost,
        why="the first launch of a kernel loads its module; later steps do not pay for it",
        gain_ms=lost,
    )


def _otherwise_explained(case: Case) -> bool:
    """Whether other processes, or compilations that never end, made some steps slow."""
    return case.contended or case.still_compiles


def slow_beginning(samples: Sequence[float]) -> int:
    """Return how many samples at the beginning are slow while the others are not.

    A single slow sample counts only if no other is slow: it could be anywhere by chance. Two or
    more in a row are not chance, and a tenth of the rest may be slow too, as on a busy machine.
    """
    if len(samples) < MIN_SAMPLES:
        return 0
    # A beginning that lies above twice the median of the rest is the upper end of all samples: both
    # that median and the accidents can be read from all of them, sorted once.
    ordered = sorted(samples)
    fastest = list(accumulate(samples[: len(samples) // 2], min))
    for count in range(len(fastest), 0, -1):
        rest = len(samples) - count
        limit = SLOW * (ordered[(rest - 1) // 2] + ordered[rest // 2]) / 2
        accidents = len(samples) - bisect_left(ordered, limit) - count
        allowed = rest // 10 if count > 1 else 0
        if fastest[count - 1] > limit and accidents <= allowed:
            return count
    return 0


def _samples(case: Case) -> Sequence[float]:
    if case.run is not None and case.run.clock is not None:
        return case.run.clock.step.values
    return [step.wall_ms for step in case.analysis.budget.steps] if case.analysis else []


def _warmup(case: Case) -> int:
    return case.run.spec.warmup if case.run else 0


RULE = check
