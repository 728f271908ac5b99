"""The tables of an op benchmark: all cells, and the best of each shape. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.bench.op_bench import Objective, OpBench
from steplab.bench.op_results import (
    WRONG,
    CellResult,
    best_mark,
    best_run,
    cell_result,
    group_by_shape,
    samples_of,
    verdict,
)
from steplab.core import Cell, Column, Run, Table

MIB = 2**20


def cell_table(bench: OpBench, runs: Sequence[Run], objective: Objective, whole: bool) -> Table:
    """One row per Run; what is the same in all of them stands in the title.

    `whole` has every error and the reasons, for files; else the largest error, for a terminal.
    """
    varying = varying_axes(bench, runs)
    marks, rows = _marks(bench, runs, objective), []
    for run in runs:
        found = cell_result(run)
        about: dict[Column, Cell] = {Column(_axis_words(n)): run.spec.config[n] for n in varying}
        if whole:
            about |= {Column(_axis_words(name)): run.spec.config[name] for name in bench.variant}
        else:
            about[Column("impl")] = bench.variant_text(run.spec.config)
        cells = {**about, **_times(bench, run, found, whole), **_costs(bench, found, whole)}
        cells[Column("spread", "%", 2)] = _spread(run, objective)
        cells |= {Column(f"by {objective}"): marks.get(run.id, ""), Column("status"): found.status}
        if whole:
            cells |= {Column("samples"): found.repeats, Column("checked"): found.checked}
            cells[Column("reason")] = run.reason
        rows.append(cells)
    title, columns = _title(bench, runs, varying), tuple(rows[0])
    values = tuple(tuple(cells.values()) for cells in rows)
    return Table(title, columns, values, table_note(bench, runs, whole))


def best_table(bench: OpBench, runs: Sequence[Run], objective: Objective) -> Table:
    """One row per shape: the best way by the objective, and whether the next is really worse."""
    varying = varying_axes(bench, runs)
    rows = [
        (*(group[0].spec.config[name] for name in varying), *verdict(bench, group, objective))
        for group in group_by_shape(bench, runs)
    ]
    unit = "MiB" if objective == "memory" else "ms"
    names = ("best", objective, "next", "next / best", "sure")
    columns = [Column(_axis_words(name)) for name in varying]
    columns += [Column(name, unit if name == objective else "") for name in names]
    return Table(f"best by {objective}", tuple(columns), tuple(rows))


def _axis_words(axis: str) -> str:
    return axis.replace("_", " ")


def _title(bench: OpBench, runs: Sequence[Run], varying: Sequence[str]) -> str:
    spec = runs[0].spec
    constant = bench.shape_text(spec.config, [name for name in bench.shape if name not in varying])
    return f"{bench.name} on {spec.device}" + (f": {constant}" if constant else "")


def _marks(bench: OpBench, runs: Sequence[Run], objective: Objective) -> dict[str, str]:
    groups = group_by_shape(bench, runs)
    found = [(best_run(group, objective), best_mark(group, objective)) for group in groups]
    return {run.id: mark for run, mark in found if run is not None}


def _times(bench: OpBench, run: Run, found: CellResult, whole: bool) -> dict[Column, Cell]:
    on_cuda = run.spec.device == "cuda"
    times = {"forward": found.forward_ms, "backward": found.backward_ms, "both": found.both_ms}
    cells: dict[Column, Cell] = {Column(name, "ms"): ms for name, ms in times.items()}
    unit, scale = ("TFLOP/s", 1e9) if on_cuda else ("GFLOP/s", 1e6)
    speeds = {}
    for name, flops in zip(("forward", "backward"), bench.flops(run.spec.config), strict=True):
        ms = times[name]
        speeds[name] = flops / ms / scale if ms else None
    if whole:
        cells |= {Column(name, unit): speed for name, speed in speeds.items()}
        return cells | ({Column("host", "ms"): found.host_ms} if on_cuda else {})
    told = " / ".join("-" if speed is None else f"{speed:.3g}" for speed in speeds.values())
    return {**cells, Column(unit): told}


def _costs(bench: OpBench, found: CellResult, whole: bool) -> dict[Column, Cell]:
    cells: dict[Column, Cell] = {Column("extra", "MiB"): _mib(found.extra_bytes)}
    if whole:
        cells[Column("kept", "MiB")] = _mib(found.kept_bytes)
        cells |= {Column(f"error {name}", "", 2): found.errors.get(name) for name in bench.results}
    else:
        cells[Column("error", "", 2)] = max(found.errors.values(), default=None)
    return {**cells, Column("of budget", "", 2): found.of_budget}


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def _spread(run: Run, objective: Objective) -> float | None:
    samples = samples_of(run, "both" if objective == "memory" else objective)
    return 100 * samples.spread if samples.values else None


METHOD = (
    "forward, backward and both: medians, each measured by itself and in turns; forward keeps what "
    "the backward needs; spread: of the middle half; FLOP/s: forward / backward\n"
    "extra: most bytes held beyond the inputs, output and gradients among them; error: norm of the "
    "difference to fp64 / norm of the truth, the largest\n"
    "of budget: the largest share of what rounding allows (twice the error of the definition in "
    "this dtype and one rounding); above 1 is wrong"
)
ON_CUDA = (
    "before every sample the L2 cache is emptied, and launches are issued ahead; host: its time to "
    "issue both"
)
ON_CPU = "wall time, caches warm"
MAX_REASONS = 12  # lines on a terminal; files have them in their rows


def table_note(bench: OpBench, runs: Sequence[Run], whole: bool) -> str:
    """Return the lines below the table; a file has the reasons in its rows instead."""
    first, all_seen = runs[0], [cell_result(run) for run in runs]
    how = ON_CUDA if first.spec.device == "cuda" else ON_CPU
    lines = [
        first.environment.conditions_on(first.spec.device),
        f"{_effort(all_seen, first)}; {how}",
        METHOD,
        f"FLOPs: {bench.flops_note}",
    ]
    axes = varying_axes(bench, runs)
    reasons = [] if whole else _reasons(bench, runs, axes)
    reasons += [f"{_name(bench, run, axes)}: {text}" for run in runs for text in run.notes]
    reasons += _partly_checked(bench, runs)
    told = list(dict.fromkeys(reasons))
    if not whole and len(told) > MAX_REASONS:
        told = [*told[:MAX_REASONS], f"and {len(told) - MAX_REASONS} more; --out has them all"]
    return "\n".join([*lines, *told])


def varying_axes(bench: OpBench, runs: Sequence[Run]) -> list[str]:
    """Return the axes of the shape that differ among the Runs."""
    return [name for name in bench.shape if len({run.spec.config[name] for run in runs}) > 1]


def _name(bench: OpBench, run: Run, axes: Sequence[str]) -> str:
    where = bench.shape_text(run.spec.config, axes)
    return (
        f"{bench.variant_text(run.spec.config)} ({where})"
        if where
        else bench.variant_text(run.spec.config)
    )


def _reasons(bench: OpBench, runs: Sequence[Run], axes: Sequence[str]) -> list[str]:
    """Return one line per row that failed; a wrong one's reason begins with that word."""
    failed = [
        (cell_result(run).status, _name(bench, run, axes), run.reason) for run in runs if run.reason
    ]
    return [f"{status}: {name}: {why.removeprefix(f'{WRONG}: ')}" for status, name, why in failed]


def _effort(all_seen: Sequence[CellResult], first: Run) -> str:
    counts = {found.repeats for found in all_seen if found.repeats}
    if not counts:
        return "nothing was timed"
    told = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    return f"{told} samples per number after {first.spec.warmup} untimed"


def _partly_checked(bench: OpBench, runs: Sequence[Run]) -> list[str]:
    """Say which shapes were not compared with fp64 whole."""
    return [
        f"error of {found.checked}: {bench.shape_text(run.spec.config)}"
        for run in runs
        if (found := cell_result(run)).checked and not found.checked.startswith("all ")
    ]
