"""The tables of an op benchmark and its chart: all cells, and the best of each shape. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steplab.bench.op_bench import Objective, OpBench
from steplab.bench.op_results import (
    MIB,
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
from steplab.report.charts.lines import LineChart, LinePanel

METHOD = (
    "forward, backward and both: medians, each measured separately and in turns; forward keeps "
    "what the backward needs; spread: of the middle half; FLOP/s: forward / backward\n"
    "extra: peak memory beyond the inputs, output and gradients included; kept: from forward to "
    "backward; error: the largest norm "
    "of a difference to fp64 / norm of the truth\n"
    "of budget: the largest share of what rounding allows (twice the error of the definition in "
    "this dtype and one rounding); above 1 is wrong"
)
ON_CUDA = (
    "the L2 cache is emptied before every sample, and launches are issued ahead; host: its time to "
    "issue both"
)
ON_CPU = "wall time, caches warm"
GROWING = {  # fields of a cell's result
    "forward_ms": "forward",
    "backward_ms": "backward",
    "extra_bytes": "extra memory",
    "kept_bytes": "kept memory",
}
MAX_REASONS = 12  # lines on a terminal; files have them in their rows


def cell_table(bench: OpBench, runs: Sequence[Run], objective: Objective, detailed: bool) -> Table:
    """Return one row per Run; axes that are the same in all of them stand in the title.

    With `detailed`, for files, it has every error and the reasons; without, for a terminal, the
    largest error.
    """
    varying = varying_axes(bench, runs)
    marks, rows = _marks(bench, runs, objective), []
    for run in runs:
        found = cell_result(run)
        about: dict[Column, Cell] = {Column(_axis_words(n)): run.spec.config[n] for n in varying}
        if detailed:
            about |= {Column(_axis_words(name)): run.spec.config[name] for name in bench.variant}
        else:
            about[Column("impl")] = bench.variant_text(run.spec.config)
        cells = {**about, **_times(bench, run, found, detailed)}
        cells |= _costs(bench, found, objective, detailed)
        cells[Column("spread", "%", 2, dispensable=4)] = _spread(run, objective)
        # The best of each shape has a table of its own.
        cells[Column(f"by {objective}", dispensable=2)] = marks.get(run.id, "")
        cells[Column("status")] = _status(run, found)
        if detailed:
            cells |= {Column("samples"): found.repeats, Column("checked"): found.checked}
            cells[Column("reason")] = run.reason
        rows.append(cells)
    title, columns = _title(bench, runs, varying), tuple(rows[0])
    values = tuple(tuple(cells.values()) for cells in rows)
    return Table(title, columns, values, table_note(bench, runs, detailed))


def best_table(bench: OpBench, runs: Sequence[Run], objective: Objective) -> Table:
    """Return one row per shape: the best variant, and whether the next one is really slower."""
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


def growth_table(bench: OpBench, runs: Sequence[Run]) -> Table | None:
    """Return how times and memory grow along the op's x axis; None where it has one value.

    One row per variant and shape, for the last step of the axis: short inputs show the costs of a
    call. An exponent of 2 is four times as much for twice the length.
    """
    others = [name for name in varying_axes(bench, runs) if name != bench.x_axis]
    groups: dict[tuple[Cell, ...], list[Run]] = {}
    for run in runs:
        if run.status == "ok":
            shape = tuple(run.spec.config[name] for name in others)
            groups.setdefault((*shape, bench.variant_text(run.spec.config)), []).append(run)
    rows = []
    for label, group in groups.items():
        group.sort(key=lambda run: float(run.spec.config[bench.x_axis]))
        if len(group) > 1:
            short, long = (cell_result(run) for run in group[-2:])
            x0, x1 = (run.spec.config[bench.x_axis] for run in group[-2:])
            exponents = [
                _exponent(getattr(short, name), getattr(long, name), x1 / x0) for name in GROWING
            ]
            rows.append((*label, f"{x0:,} to {x1:,}", *exponents))
    if not rows:
        return None
    names = (*map(_axis_words, others), "impl", _axis_words(bench.x_axis))
    columns = [*map(Column, names), *(Column(name, "", 3) for name in GROWING.values())]
    title = f"growth with {_axis_words(bench.x_axis)}: exponent p of y ~ x^p"
    return Table(title, tuple(columns), tuple(rows))


def _exponent(before: float | None, after: float | None, ratio: float) -> float | None:
    return math.log(after / before) / math.log(ratio) if before and after else None


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


def _times(bench: OpBench, run: Run, found: CellResult, detailed: bool) -> dict[Column, Cell]:
    on_cuda = run.spec.device == "cuda"
    times = {"forward": found.forward_ms, "backward": found.backward_ms, "both": found.both_ms}
    cells: dict[Column, Cell] = {Column(name, "ms"): ms for name, ms in times.items()}
    unit, scale = ("TFLOP/s", 1e9) if on_cuda else ("GFLOP/s", 1e6)
    speeds = {}
    for name, flops in zip(("forward", "backward"), bench.flops(run.spec.config), strict=True):
        ms = times[name]
        speeds[name] = flops / ms / scale if ms else None
    if detailed:
        cells |= {Column(name, unit): speed for name, speed in speeds.items()}
        return cells | ({Column("host", "ms"): found.host_ms} if on_cuda else {})
    shown = " / ".join("-" if speed is None else f"{speed:.3g}" for speed in speeds.values())
    return {**cells, Column(unit, dispensable=5): shown}


def _costs(
    bench: OpBench, found: CellResult, objective: Objective, detailed: bool
) -> dict[Column, Cell]:
    cells: dict[Column, Cell] = {
        Column("extra", "MiB", dispensable=int(objective != "memory")): _mib(found.extra_bytes),
        Column("kept", "MiB"): _mib(found.kept_bytes),
    }
    if detailed:
        cells |= {Column(f"error {name}", "", 2): found.errors.get(name) for name in bench.results}
    else:
        cells[Column("error", "", 2)] = max(found.errors.values(), default=None)
    return {**cells, Column("of budget", "", 2, dispensable=3): found.of_budget}


def _status(run: Run, found: CellResult) -> str:
    """How a cell ended, with the names of what makes its samples doubtful: `ok, noisy`."""
    return ", ".join([found.status, *(run.clock.caution_names if run.clock else ())])


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def _spread(run: Run, objective: Objective) -> float | None:
    samples = samples_of(run, "both" if objective == "memory" else objective)
    return 100 * samples.spread if samples.values else None


def table_note(bench: OpBench, runs: Sequence[Run], detailed: bool) -> str:
    """Return the lines below the table; a file has the reasons in its rows instead."""
    first = runs[0]
    how = ON_CUDA if first.spec.device == "cuda" else ON_CPU
    lines = [
        first.environment.conditions_on(first.spec.device),
        f"{_sample_counts(runs)}; {how}",
        METHOD,
        f"FLOPs: {bench.flops_note}",
    ]
    axes = varying_axes(bench, runs)
    reasons = [] if detailed else _reasons(bench, runs, axes)
    reasons += [f"{_name(bench, run, axes)}: {text}" for run in runs for text in run.notes]
    reasons += _partly_checked(bench, runs)
    shown = list(dict.fromkeys(reasons))
    if not detailed and len(shown) > MAX_REASONS:
        shown = [*shown[:MAX_REASONS], f"and {len(shown) - MAX_REASONS} more; --out has them all"]
    return "\n".join([*lines, *shown])


def varying_axes(bench: OpBench, runs: Sequence[Run]) -> list[str]:
    """Return the axes of the shape that differ among the Runs."""
    return [name for name in bench.shape if len({run.spec.config[name] for run in runs}) > 1]


def _name(bench: OpBench, run: Run, axes: Sequence[str]) -> str:
    variant, shape = bench.variant_text(run.spec.config), bench.shape_text(run.spec.config, axes)
    return f"{variant} ({shape})" if shape else variant


def _reasons(bench: OpBench, runs: Sequence[Run], axes: Sequence[str]) -> list[str]:
    """Return one line per row that failed; the reason of a wrong one already begins so."""
    lines = []
    for run in runs:
        if run.reason:
            reason = run.reason.removeprefix(f"{WRONG}: ")
            lines.append(f"{cell_result(run).status}: {_name(bench, run, axes)}: {reason}")
    return lines


def _sample_counts(runs: Sequence[Run]) -> str:
    counts = {result.repeats for run in runs if (result := cell_result(run)).repeats}
    if not counts:
        return "nothing was timed"
    shown = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    return f"{shown} samples per number after {runs[0].spec.warmup} untimed"


def _partly_checked(bench: OpBench, runs: Sequence[Run]) -> list[str]:
    """Say which shapes were compared with fp64 only in part."""
    return [
        f"error of {found.checked}: {bench.shape_text(run.spec.config)}"
        for run in runs
        if (found := cell_result(run)).checked and not found.checked.startswith("all ")
    ]


def chart_of(bench: OpBench, runs: Sequence[Run], objective: Objective) -> LineChart:
    """Return the chart of an objective along the op's x axis; rows that failed are named."""
    axes = [name for name in bench.shape if name != bench.x_axis]
    panels: dict[str, LinePanel] = {}
    for run in runs:
        config, result = run.spec.config, cell_result(run)
        title = bench.shape_text(config, axes)
        panel = panels.setdefault(title, LinePanel(title))
        variant, x = bench.variant_text(config), config[bench.x_axis]
        value = result.value(objective)
        if run.status == "ok" and value:
            scale = MIB if objective == "memory" else 1
            panel.lines.setdefault(variant, {})[x] = value / scale
        else:
            panel.notes.append(f"{variant} at {x:,}: {result.status}")
    unit = "extra memory [MiB]" if objective == "memory" else f"{objective} [ms]"
    title = f"{bench.name} on {runs[0].environment.conditions_on(runs[0].spec.device)}"
    return LineChart(title, _axis_words(bench.x_axis), unit, tuple(panels.values()))
