"""Op and phase times of a step, and those of earlier winners that still apply. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from steplab.core import Run
from steplab.trace.analysis import Analysis, Floats
from steplab.trace.budget import idle_before
from steplab.trace.phases import PHASES
from steplab.tune.ceilings import STARVED_TERMS, launch_share, step_ms
from steplab.tune.proposals import impls_of


def op_times(
    run: Run, analysis: Analysis, modules: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return ms per step of "op:<name>" for every op in `modules`, nested modules included.

    Forward and backward. On a GPU it is the time of the kernels; "idle:<name>" is how long the
    device waited for them, which another implementation may shorten. On a CPU the times are scaled
    to the step without the profiler.
    """
    busy, idle, found = _busy_ms(run, analysis), _idle_ms(run, analysis), {}
    for op, paths in modules.items():
        inside = [_within(label, paths) for label in analysis.work.labels]
        mine = np.array(inside, dtype=bool)[analysis.work.module]
        if busy[mine].any():
            found[f"op:{op}"] = float(busy[mine].sum())
            if analysis.budget.on_device:
                found[f"idle:{op}"] = float(idle[mine].sum())
    return found


def phase_times(run: Run, analysis: Analysis) -> dict[str, float]:
    """Return ms per step of "phase:<name>" by the trace: kernels, and the wait for them.

    The clock cannot tell the phases of a replayed graph apart. The trace can, where its kernels
    have been matched with those of a detailed step.
    """
    spent = _busy_ms(run, analysis) + _idle_ms(run, analysis)
    by_label = np.bincount(analysis.work.phase, spent, len(analysis.work.labels)).tolist()
    named = zip(analysis.work.labels, by_label, strict=True)
    return {f"phase:{label}": ms for label, ms in named if label in PHASES and ms > 0}


def _busy_ms(run: Run, analysis: Analysis) -> Floats:
    """Return what each row of Work adds to the ms of a step."""
    work, budget = analysis.work, analysis.budget
    wall = budget.typical.wall_ms if budget.steps else 0.0
    slowed = not budget.on_device and wall > 0
    scale = min(1.0, step_ms(run) / wall) if slowed else 1.0
    inside = (work.duration * (work.step >= 0)).astype(np.float64)
    return inside * (scale / 1e6 / max(len(analysis.windows), 1))


def _idle_ms(run: Run, analysis: Analysis) -> Floats:
    """Return the ms for which the device waited for each row in the typical step.

    What the profiler added is taken away evenly from all that waited for its launch.
    """
    work, budget = analysis.work, analysis.budget
    if not budget.on_device or not budget.steps:
        return np.zeros(len(work))
    typical = budget.typical
    window = next(w for w in analysis.windows if w.number == typical.number)
    idle = idle_before(analysis.trace, analysis.windows, work, analysis.syncs, window)
    shares = {"launch": launch_share(typical, run)}
    total: Floats = sum((idle[term] * shares.get(term, 1.0) for term in STARVED_TERMS), np.zeros(1))
    return total[:-1] / 1e6


def _within(label: str, paths: Sequence[str]) -> bool:
    return any(label == path or label.startswith(f"{path}.") for path in paths)


def still_known(known: Mapping[str, float], before: Run, after: Run) -> dict[str, float]:
    """Return the times known of the step `before` that still apply to the step `after`.

    Those of an op that another implementation computes now do not.
    """
    had, has = impls_of(before), impls_of(after)
    changed = {op for op in had.keys() | has.keys() if had.get(op) != has.get(op)}
    gone = {f"{scheme}:{op}" for scheme in ("op", "idle") for op in changed}
    return {part: ms for part, ms in known.items() if part not in gone}
