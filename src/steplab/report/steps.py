"""Runs of training steps as tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from steplab.compare.statistics import line_fit, local_exponent
from steplab.record import Column, Run, Table
from steplab.record.table import Cell


def step_table(runs: Sequence[Run], title: str = "training step") -> Table:
    """One row per Run: what varied, the time, what it means, how it ended."""
    axes = varying_axes(runs)
    columns = [Column(axis) for axis in axes]
    columns += [
        Column("step median", "ms"),
        Column("p10", "ms"),
        Column("p90", "ms"),
        Column("spread", "%"),
        Column("tokens/s"),
        Column("MFU", "%"),
        Column("peak memory", "GiB"),
        Column("attention"),
        Column("status"),
    ]
    rows = []
    for run in runs:
        row: list[Cell] = [axis_value(run, axis) for axis in axes]
        rows.append(tuple(row + _measured(run)))
    return Table(title, tuple(columns), tuple(rows), _note(runs))


def varying_axes(runs: Sequence[Run]) -> list[str]:
    """Return what tells the Runs apart; size, batch, mode and recipe are always shown."""
    config = dict.fromkeys(key for run in runs for key in run.spec.config)
    shown = [key for key in config if key == "context" or _distinct(runs, key) > 1]
    # A size sets many fields at once; only those that vary within a size say something new.
    sizes = {run.spec.size for run in runs}
    own = [
        key
        for key in shown
        if key == "context"
        or any(_distinct([r for r in runs if r.spec.size == size], key) > 1 for size in sizes)
    ]
    axes = ["size"] if any(sizes) else []
    axes += [*own, "batch", "mode", "recipe"]
    for extra in ("accumulate", "warmup"):
        if len({getattr(run.spec, extra) for run in runs}) > 1:
            axes.append(extra)
    return axes


def axis_value(run: Run, axis: str) -> Cell:
    """Return a Run's value on an axis of `varying_axes`."""
    if axis == "recipe":
        return run.spec.recipe.label
    if axis in ("size", "batch", "mode", "accumulate", "warmup"):
        value: Cell = getattr(run.spec, axis)
        return value
    found: Cell = run.spec.config.get(axis)
    return found


def scaling_table(runs: Sequence[Run], axis: str) -> Table | None:
    """How time grows along a numeric axis: ratio, local exponent, and the fixed cost apart.

    The fixed cost is the intercept of time against the model's FLOPs: what a step would take
    with no work in it. None when no two Runs differ in that axis alone.
    """
    rows: list[tuple[Cell, ...]] = []
    others = [a for a in varying_axes(runs) if a != axis]
    for label, group in _groups(runs, others, axis).items():
        fixed, rate = _fixed_cost(group)
        for before, after in pairwise(group):
            x0, x1 = axis_value(before, axis), axis_value(after, axis)
            t0, t1 = _median(before), _median(after)
            assert isinstance(x0, (int, float)) and isinstance(x1, (int, float))
            exponent = local_exponent(x0, t0, x1, t1)
            rows.append((label, f"{x0} to {x1}", x1 / x0, t1 / t0, exponent, fixed, rate))
    if not rows:
        return None
    columns = (
        Column(", ".join(others)),
        Column(axis),
        Column(f"{axis} ratio"),
        Column("time ratio"),
        Column("local exponent"),
        Column("fixed cost", "ms"),
        Column("marginal rate", "TFLOP/s"),
    )
    note = "fixed cost and rate: least squares of time = fixed + model FLOPs / rate"
    return Table(f"scaling with {axis}", columns, tuple(rows), note)


def numeric_axes(runs: Sequence[Run]) -> list[str]:
    """Return the axes along which scaling can be told."""
    return [
        axis
        for axis in varying_axes(runs)
        if axis not in ("warmup", "size", "mode", "recipe")
        and len({axis_value(run, axis) for run in runs}) > 1
        and all(isinstance(axis_value(run, axis), (int, float)) for run in runs)
    ]


def _measured(run: Run) -> list[Cell]:
    if run.clock is None:
        return [None, None, None, None, None, None, None, "", f"{run.status}: {run.reason}"]
    step = run.clock.step
    mfu = run.figures.mfu if run.figures else None
    return [
        step.median,
        step.percentile(10),
        step.percentile(90),
        step.spread * 100,
        round(run.tokens_per_second or 0),
        None if mfu is None else mfu * 100,
        run.memory.peak / 2**30 if run.memory else None,
        ", ".join(run.ran.impls.get("attention", ())) if run.ran else "",
        ", ".join([run.status, *_marks(run)]),
    ]


def _marks(run: Run) -> list[str]:
    """Words that warn: the beginnings of the Run's notes, which stand in full under the table."""
    marks = [note.split(":")[0] for note in run.notes]
    return marks + (["host-bound"] if run.clock and run.clock.host_bound else [])


def _note(runs: Sequence[Run]) -> str:
    """The conditions, the formula and the peak: under every table."""
    if not runs:
        return ""
    lines = dict.fromkeys(run.environment.conditions for run in runs)
    for run in runs:
        if run.figures and run.figures.mfu is not None:
            peak = f"{run.figures.peak_tflops:g} TFLOP/s, {run.figures.peak_source}"
            lines[f"MFU = model FLOPs / (time x {peak})"] = None
        elif run.figures:
            lines[f"MFU unknown: {run.figures.peak_source}; --mfu-peak-tflops sets a peak"] = None
    formulas = {run.work.formula for run in runs if run.work}
    if len(formulas) == 1:
        lines[f"FLOPs: {formulas.pop()}"] = None
    for run in runs:
        if run.work and run.work.covered_calls is not None:
            missing = ", ".join(f"{op} x {n}" for op, n in run.work.uncovered_calls.items())
            covered = run.work.covered_calls
            share = covered / max(covered + sum(run.work.uncovered_calls.values()), 1)
            lines[f"FLOP formulas cover {share:.0%} of the heavy calls; none for: "
                  f"{missing or 'no op'}"] = None  # fmt: skip
    for number, run in enumerate(runs, 1):
        lines |= {f"row {number}, {note}": None for note in run.notes if "noisy" not in note}
    return "\n".join(lines)


def _groups(runs: Sequence[Run], others: Sequence[str], axis: str) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.clock is not None:
            label = ", ".join(str(axis_value(run, other)) for other in others)
            groups.setdefault(label, []).append(run)
    for group in groups.values():
        group.sort(key=lambda run: float(axis_value(run, axis) or 0))
    return groups


def _fixed_cost(group: Sequence[Run]) -> tuple[float | None, float | None]:
    work = [run.work.model if run.work else None for run in group]
    if len(group) < 2 or any(w is None for w in work) or len(set(work)) < 2:
        return None, None
    intercept, slope = line_fit([w or 0.0 for w in work], [_median(run) for run in group])
    return intercept, 1e-9 / slope if slope > 0 else None


def _median(run: Run) -> float:
    assert run.clock is not None
    return run.clock.step.median


def _distinct(runs: Sequence[Run], key: str) -> int:
    return len({str(run.spec.config.get(key)) for run in runs})
