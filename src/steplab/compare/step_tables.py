"""Runs of one sweep as tables: step times, phases, utilization, compilation."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.core import Cell, Column, Counters, Run, Samples, Table

SPEC_AXES = ("size", "batch", "mode", "recipe", "ranks", "accumulate", "warmup")
PHASES = ("forward", "backward", "sync", "clip", "optimizer")  # in the order of a step
LENGTHS = ("context", "seq_max_len")  # a condition of every number, even where it is constant


def varying_axes(runs: Sequence[Run]) -> list[str]:
    """Return the axes in which the Runs differ; for a single one mode and recipe.

    A size sets many config fields at once: only those that vary within a size count.
    """
    sizes = {run.spec.size for run in runs}
    config = dict.fromkeys(key for run in runs for key in run.spec.config)
    own = [
        key
        for key in config
        if any(_distinct([r for r in runs if r.spec.size == size], key) > 1 for size in sizes)
    ]
    axes = ["size", *own, *SPEC_AXES[1:]]
    found = [axis for axis in axes if _distinct(runs, axis) > 1]
    return found or ["mode", "recipe"]


def constants(runs: Sequence[Run]) -> str:
    """Return the main conditions that all Runs share, for a title: `tiny, context 128, batch 4`."""
    words = []
    lengths = [key for key in LENGTHS if all(key in run.spec.config for run in runs)]
    for axis in ("size", *lengths, "batch", "mode", "recipe"):
        if runs and _distinct(runs, axis) == 1:
            value = axis_value(runs[0], axis)
            name = "" if axis in ("size", "mode", "recipe") else f"{axis} "
            words += [f"{name}{value}"] if value not in ("", "plain") else []
    return ", ".join(words)


def axis_value(run: Run, axis: str) -> Cell:
    """Return a Run's value on an axis."""
    if axis == "recipe":
        return run.spec.recipe.label
    if axis in SPEC_AXES:
        value: Cell = getattr(run.spec, axis)
        return value
    found: Cell = run.spec.config.get(axis)
    return found


def numeric_axes(runs: Sequence[Run]) -> list[str]:
    """Return the axes along which a step can scale."""
    return [
        axis
        for axis in varying_axes(runs)
        if axis not in ("warmup", "size", "mode", "recipe", "ranks")
        and all(isinstance(axis_value(run, axis), (int, float)) for run in runs)
    ]


def _distinct(runs: Sequence[Run], axis: str) -> int:
    return len({str(axis_value(run, axis)) for run in runs})


def step_table(runs: Sequence[Run], title: str = "training step") -> Table:
    """One row per Run: what varied, the time, what it means, how it ended.

    What all Runs share is in the title or in the note.
    """
    axes = varying_axes(runs)
    with_cv = "warmup" in axes
    several = len({_ran(run) for run in runs}) > 1
    columns = [Column(axis) for axis in axes]
    columns += [Column("step median", "ms"), Column("p10", "ms"), Column("p90", "ms")]
    columns += [Column("spread", "%")]
    columns += [Column("cv", "%")] if with_cv else []
    columns += [Column("tokens/s"), Column("MFU", "%"), Column("peak memory", "GiB")]
    columns += [Column("ran")] if several else []
    columns += [Column("status")]
    rows = []
    for run in runs:
        labels: list[Cell] = [axis_value(run, axis) for axis in axes]
        ran = [_ran(run)] if several else []
        rows.append((*labels, *_measured(run, with_cv), *ran, _status(run)))
    full_title = f"{title}: {constants(runs)}" if constants(runs) else title
    table = Table(full_title, tuple(columns), tuple(rows), _note(runs))
    return table.without_unknown_columns()


def _measured(run: Run, with_cv: bool) -> list[Cell]:
    if run.clock is None:
        return [None] * (8 if with_cv else 7)
    step = run.clock.step
    cells: list[Cell] = [step.median, step.percentile(10), step.percentile(90), step.spread * 100]
    cells += [step.cv * 100] if with_cv else []
    cells += [round(run.tokens_per_second or 0)]
    cells += [_percent(run.figures.mfu) if run.figures else None]
    return [*cells, run.memory.peak / 2**30 if run.memory else None]


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


def phase_table(runs: Sequence[Run]) -> Table | None:
    """Median milliseconds per phase, data wait and host time; None when nothing was measured."""
    timed = [run for run in runs if run.clock is not None]
    seen = dict.fromkeys(name for run in timed if run.clock for name in run.clock.phases)
    names = sorted(seen, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
    if not timed:
        return None
    columns = [Column("data wait", "ms"), *(Column(name, "ms") for name in names)]
    columns += [Column("host", "ms"), Column("device busy", "ms")]
    columns += [Column("kernel launches"), Column("limit")]
    rows = []
    for run in timed:
        assert run.clock is not None
        phases = run.clock.phases
        spent: list[Cell] = [phases[n].median if n in phases else "" for n in names]
        launches = run.ran.kernel_launches if run.ran else None
        busy = run.ran.device_busy_ms if run.ran else None
        tail = [run.clock.host.median, busy, launches, limit_of(run)]
        rows.append((*_labels(runs, run), run.clock.data_wait.median, *spent, *tail))
    note = (
        "device time of each phase; host: time Python needed to issue the step; device busy: "
        "kernels of the profiled step"
    )
    table = Table("where the time goes", _columns(runs, columns), tuple(rows), note)
    return table.without_unknown_columns()


def utilization_table(runs: Sequence[Run]) -> Table | None:
    """The three figures that are never mixed, with the device's own counters; None if unknown."""
    known = [run for run in runs if run.figures and run.figures.peak_tflops is not None]
    if not known:
        return None
    titles = ("MFU", "MFU PaLM", "HFU", "SM busy", "tensor cores active", "HBM bandwidth")
    columns = [Column("model work", "TFLOP"), *(Column(title, "%") for title in titles)]
    columns += [Column("power", "W"), Column("SM clock", "MHz")]
    rows = []
    for run in known:
        assert run.figures is not None and run.work is not None
        counters, figures = run.counters or Counters(), run.figures
        work = None if run.work.model is None else run.work.model / 1e12
        shares = [_percent(f) for f in (figures.mfu, figures.mfu_palm, figures.hfu)]
        seen = (counters.sm_util_pct, counters.tensor_util_pct, counters.hbm_util_pct)
        read = [_median(s) for s in (*seen, counters.power_w, counters.sm_clock_mhz)]
        rows.append((*_labels(runs, run), work, *shares, *read))
    note = (
        "MFU: active matmul parameters and visible attention pairs. MFU PaLM: all pairs. HFU: what "
        "the kernels execute,\nrecomputation included. HBM bandwidth: measured over peak, from GPM "
        "counters."
    )
    table = Table("how well the device is used", _columns(runs, columns), tuple(rows), note)
    return table.without_unknown_columns()


def compilation_table(runs: Sequence[Run]) -> Table | None:
    """Graphs, breaks, recompiles and the seconds they took; None for eager Runs."""
    compiled = [run for run in runs if run.compilation is not None]
    if not compiled:
        return None
    columns = [Column("graphs"), Column("breaks"), Column("recompiles")]
    columns += [Column("first step", "s"), Column("cold", "s"), Column("warm", "s")]
    rows, reasons = [], []
    for run in compiled:
        c = run.compilation
        assert c is not None
        counts = (c.graphs, sum(c.breaks.values()), len(c.recompiles))
        seconds = (c.first_seconds, c.cold_seconds, c.warm_seconds)
        rows.append((*_labels(runs, run), *counts, *seconds))
        reasons += [f"graph break: {reason} (x{n})" for reason, n in c.breaks.items()]
        reasons += [f"recompile of {r.function}: {r.reason}" for r in c.recompiles]
    note = (
        "cold: the first step when nothing came out of the compile cache, else unknown; warm: the "
        "first step after a reset, cache filled"
    )
    lines = dict.fromkeys([note, *reasons])
    return Table("compilation", _columns(runs, columns), tuple(rows), "\n".join(lines))


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else fraction * 100


def _columns(runs: Sequence[Run], own: list[Column]) -> tuple[Column, ...]:
    return (*(Column(axis) for axis in varying_axes(runs)), *own)


def _labels(runs: Sequence[Run], run: Run) -> list[Cell]:
    return [axis_value(run, axis) for axis in varying_axes(runs)]


def limit_of(run: Run) -> str:
    """What the step waits for: the device when it is busy nine tenths of the time, else the host.

    The host's own time does not tell: with a full launch queue it waits for the device.
    """
    assert run.clock is not None
    step = run.clock.step.median
    idle_long_enough = run.clock.data_wait.median > 0.05 * step
    if run.clock.source != "cuda events":
        return "data" if idle_long_enough else "cpu"
    busy = run.ran.device_busy_ms if run.ran else None
    if busy is None:
        return "unknown"
    if busy >= 0.9 * step:
        return "device"
    return "data" if idle_long_enough else "host"


def _median(samples: Samples | None) -> float | None:
    return samples.median if samples and samples.values else None
