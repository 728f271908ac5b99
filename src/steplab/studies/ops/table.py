"""The tables of a study of an op: all cells, and the best of each shape. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.record import Column, Run, Table
from steplab.record.table import Cell
from steplab.studies.ops.best import best_of, by_shape, mark_of, verdict
from steplab.studies.ops.note import note, varying_axes
from steplab.studies.ops.op import Objective, Op, shape_text, way_text
from steplab.studies.ops.rows import Seen, samples_of, seen

MIB = 2**20


def cell_table(op: Op, runs: Sequence[Run], objective: Objective, whole: bool) -> Table:
    """One row per Run; what is the same in all of them stands in the title.

    `whole` has every error and the reasons, for files; else the largest error, for a terminal.
    """
    varying = varying_axes(op, runs)
    marks, rows = _marks(op, runs, objective), []
    for run in runs:
        found = seen(run)
        about: dict[Column, Cell] = {Column(_told(n)): run.spec.config[n] for n in varying}
        if whole:
            about |= {Column(_told(name)): run.spec.config[name] for name in op.ways}
        else:
            about[Column("impl")] = way_text(op, run.spec.config)
        cells = {**about, **_times(op, run, found, whole), **_costs(op, found, whole)}
        cells[Column("spread", "%", 2)] = _spread(run, objective)
        cells |= {Column(f"by {objective}"): marks.get(run.id, ""), Column("status"): found.status}
        if whole:
            cells |= {Column("samples"): found.repeats, Column("checked"): found.checked}
            cells[Column("reason")] = run.reason
        rows.append(cells)
    title, columns = _title(op, runs, varying), tuple(rows[0])
    values = tuple(tuple(cells.values()) for cells in rows)
    return Table(title, columns, values, note(op, runs, whole))


def best_table(op: Op, runs: Sequence[Run], objective: Objective) -> Table:
    """One row per shape: the best way by the objective, and whether the next is really worse."""
    varying = varying_axes(op, runs)
    rows = [
        (*(group[0].spec.config[name] for name in varying), *verdict(op, group, objective))
        for group in by_shape(op, runs)
    ]
    unit = "MiB" if objective == "memory" else "ms"
    names = ("best", objective, "next", "next / best", "sure")
    columns = [Column(_told(name)) for name in varying]
    columns += [Column(name, unit if name == objective else "") for name in names]
    return Table(f"best by {objective}", tuple(columns), tuple(rows))


def _told(axis: str) -> str:
    return axis.replace("_", " ")


def _title(op: Op, runs: Sequence[Run], varying: Sequence[str]) -> str:
    spec = runs[0].spec
    constant = shape_text(op, spec.config, [name for name in op.shape if name not in varying])
    return f"{op.name} on {spec.device}" + (f": {constant}" if constant else "")


def _marks(op: Op, runs: Sequence[Run], objective: Objective) -> dict[str, str]:
    groups = by_shape(op, runs)
    found = [(best_of(group, objective), mark_of(group, objective)) for group in groups]
    return {run.id: mark for run, mark in found if run is not None}


def _times(op: Op, run: Run, found: Seen, whole: bool) -> dict[Column, Cell]:
    on_cuda = run.spec.device == "cuda"
    times = {"forward": found.forward_ms, "backward": found.backward_ms, "both": found.both_ms}
    cells: dict[Column, Cell] = {Column(name, "ms"): ms for name, ms in times.items()}
    unit, scale = ("TFLOP/s", 1e9) if on_cuda else ("GFLOP/s", 1e6)
    speeds = {}
    for name, flops in zip(("forward", "backward"), op.flops(run.spec.config), strict=True):
        ms = times[name]
        speeds[name] = flops / ms / scale if ms else None
    if whole:
        cells |= {Column(name, unit): speed for name, speed in speeds.items()}
        return cells | ({Column("host", "ms"): found.host_ms} if on_cuda else {})
    told = " / ".join("-" if speed is None else f"{speed:.3g}" for speed in speeds.values())
    return {**cells, Column(unit): told}


def _costs(op: Op, found: Seen, whole: bool) -> dict[Column, Cell]:
    cells: dict[Column, Cell] = {Column("extra", "MiB"): _mib(found.extra_bytes)}
    if whole:
        cells[Column("kept", "MiB")] = _mib(found.kept_bytes)
        cells |= {Column(f"error {name}", "", 2): found.errors.get(name) for name in op.results}
    else:
        cells[Column("error", "", 2)] = max(found.errors.values(), default=None)
    return {**cells, Column("of budget", "", 2): found.of_budget}


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def _spread(run: Run, objective: Objective) -> float | None:
    samples = samples_of(run, "both" if objective == "memory" else objective)
    return 100 * samples.spread if samples.values else None
