"""Milliseconds of a step in the modules of each op, forward and backward. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from steplab.record import Run
from steplab.trace.analysis import Analysis
from steplab.tune.ceilings import step_ms


def op_times(
    run: Run, analysis: Analysis, modules: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Return ms per step of "op:<name>" for every op in `modules`, nested modules included.

    On a CPU times are scaled to the step without the profiler.
    """
    work, steps = analysis.work, max(len(analysis.windows), 1)
    inside = work.step >= 0
    wall = analysis.budget.typical.wall_ms if analysis.budget.steps else 0.0
    slowed = not analysis.budget.on_device and wall > 0
    scale = min(1.0, step_ms(run) / wall) if slowed else 1.0
    found = {}
    for op, paths in modules.items():
        mine = np.array([_within(label, paths) for label in work.labels], dtype=bool)
        spent = work.duration[mine[work.module] & inside].sum()
        if spent > 0:
            found[f"op:{op}"] = float(spent) / 1e6 / steps * scale
    return found


def _within(label: str, paths: Sequence[str]) -> bool:
    return any(label == path or label.startswith(f"{path}.") for path in paths)
