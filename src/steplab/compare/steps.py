"""Runs of training steps as tables."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.compare.axes import axis_value, constants, varying_axes
from steplab.record import Column, Run, Table
from steplab.record.table import Cell


def step_table(runs: Sequence[Run], title: str = "training step") -> Table:
    """One row per Run: what varied, the time, what it means, how it ended.

    What all Runs share stands in the title, or below.
    """
    axes = varying_axes(runs)
    columns = [Column(axis) for axis in axes]
    columns += [
        Column("step median", "ms"),
        Column("p10", "ms"),
        Column("p90", "ms"),
        Column("spread", "%"),
        *([Column("cv", "%")] if "warmup" in axes else []),
        Column("tokens/s"),
        Column("MFU", "%"),
        Column("peak memory", "GiB"),
    ]
    several = len({_ran(run) for run in runs}) > 1
    columns += [*([Column("ran")] if several else []), Column("status")]
    rows = []
    for run in runs:
        labels: list[Cell] = [axis_value(run, axis) for axis in axes]
        ran = [_ran(run)] if several else []
        rows.append((*labels, *_measured(run, "warmup" in axes), *ran, _status(run)))
    full_title = f"{title}: {constants(runs)}" if constants(runs) else title
    table = Table(full_title, tuple(columns), tuple(rows), _note(runs))
    return table.without_unknown_columns()


def _measured(run: Run, with_cv: bool) -> list[Cell]:
    if run.clock is None:
        return [None] * (8 if with_cv else 7)
    step = run.clock.step
    mfu = run.figures.mfu if run.figures else None
    return [
        step.median,
        step.percentile(10),
        step.percentile(90),
        step.spread * 100,
        *([step.cv * 100] if with_cv else []),
        round(run.tokens_per_second or 0),
        None if mfu is None else mfu * 100,
        run.memory.peak / 2**30 if run.memory else None,
    ]


def _status(run: Run) -> str:
    """How it ended, with the reason, or with words that warn: the beginnings of its notes."""
    if run.status != "ok":
        return f"{run.status}: {run.reason}"
    return ", ".join(["ok", *(note.split(":")[0] for note in run.notes)])


def _ran(run: Run) -> str:
    """The implementations that executed, as in `attention=flash, experts=grouped`."""
    impls = run.ran.impls if run.ran else {}
    return ", ".join(f"{op}={'/'.join(names)}" for op, names in sorted(impls.items()))


def _note(runs: Sequence[Run]) -> str:
    """The conditions, the formula and the peak: under every table."""
    if not runs:
        return ""
    lines = dict.fromkeys(run.environment.conditions_on(run.spec.device) for run in runs)
    for run in runs:
        if run.figures and run.figures.mfu is not None:
            peak = f"{run.figures.peak_tflops:g} TFLOP/s, {run.figures.peak_source}"
            lines[f"MFU = model FLOPs / (time x {peak})"] = None
        elif run.figures and run.figures.peak_tflops is None:
            lines[f"MFU unknown: {run.figures.peak_source}; --mfu-peak-tflops sets a peak"] = None
        elif run.figures:
            lines["MFU unknown: some heavy ops have no FLOP formula"] = None
    shared = {_ran(run) for run in runs}
    if len(shared) == 1 and shared != {""}:
        lines[f"ran: {shared.pop()}"] = None
    for run in runs:
        if run.work and run.work.formula:
            lines[f"FLOPs, {run.spec.mode}: {run.work.formula}"] = None
        if run.memory:
            lines[f"peak memory: {run.memory.source}"] = None
    for run in runs:
        if run.work and run.work.covered_calls is not None:
            missing = ", ".join(f"{op} x {n}" for op, n in run.work.uncovered_calls.items())
            covered = run.work.covered_calls
            share = covered / max(covered + sum(run.work.uncovered_calls.values()), 1)
            lacking = f"; none for: {missing}" if missing else ""
            lines[f"FLOP formulas cover {share:.0%} of the heavy calls{lacking}"] = None
    for number, run in enumerate(runs, 1):
        lines |= {f"row {number}, {note}": None for note in run.notes if "noisy" not in note}
    return "\n".join(lines)
