"""How a step's time grows along one axis."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from steplab.compare.step_tables import label_axes, limit_of
from steplab.core import Cell, Column, Run, Table
from steplab.core.spec import axis_value


def scaling_table(runs: Sequence[Run], axis: str) -> Table | None:
    """How time grows along a numeric axis: ratio, local exponent, and the fixed cost apart.

    The fixed cost is the intercept of time against the model's FLOPs: what a step would take
    with no work in it. None when no two Runs differ in that axis alone.
    """
    rows: list[tuple[Cell, ...]] = []
    others = [a for a in label_axes(runs) if a != axis]
    for label, group in _groups(runs, others, axis).items():
        fixed, rate = _fixed_cost(group)
        for before, after in pairwise(group):
            x0, x1 = axis_value(before.spec, axis), axis_value(after.spec, axis)
            t0, t1 = _median(before), _median(after)
            assert isinstance(x0, (int, float)) and isinstance(x1, (int, float))
            exponent = math.log(t1 / t0) / math.log(x1 / x0)  # p in time ~ x^p
            rows.append((label, f"{x0} to {x1}", x1 / x0, t1 / t0, exponent, fixed, rate))
    if not rows:
        return None
    columns = (
        Column(", ".join(others) or "runs"),
        Column(axis),
        Column(f"{axis} ratio"),
        Column("time ratio"),
        Column("local exponent"),
        Column("fixed cost", "ms"),
        Column("marginal rate", "TFLOP/s"),
    )
    note = (
        "fixed cost and rate: least squares of time = fixed + model FLOPs / rate, 3 points at\n"
        "least; unknown where a step waits for the host, whose time does not follow the FLOPs"
    )
    return Table(f"scaling with {axis}", columns, tuple(rows), note)


def _groups(runs: Sequence[Run], others: Sequence[str], axis: str) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.clock is not None:
            label = ", ".join(str(axis_value(run.spec, other)) for other in others) or "all"
            groups.setdefault(label, []).append(run)
    for group in groups.values():
        group.sort(key=lambda run: float(axis_value(run.spec, axis) or 0))
    return groups


def _fixed_cost(group: Sequence[Run]) -> tuple[float | None, float | None]:
    work = [run.work.model if run.work else None for run in group]
    if any(limit_of(run) == "host" for run in group):
        return None, None
    if len(group) < 3 or any(w is None for w in work) or len(set(work)) < 2:
        return None, None
    fit = statistics.linear_regression([w or 0.0 for w in work], [_median(run) for run in group])
    if fit.intercept < 0 or fit.slope <= 0:  # noise, or time that does not grow with the work
        return None, None
    return fit.intercept, 1e-9 / fit.slope


def _median(run: Run) -> float:
    assert run.clock is not None
    return run.clock.step.median
