"""Runs of one sweep as tables: step times, phases, utilization, compilation."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.core import Cell, Column, Counters, Run, Samples, Table
from steplab.core.run import rate_name
from steplab.core.spec import WORDS, axes_text, axis_value, shared_text, varying_axes

PHASES = ("forward", "backward", "sync", "clip", "optimizer")  # in the order of a step


def label_axes(runs: Sequence[Run]) -> list[str]:
    """Return the axes that tell the Runs apart; for a single one mode and recipe."""
    return varying_axes([run.spec for run in runs]) or ["mode", "recipe"]


def numeric_axes(runs: Sequence[Run]) -> list[str]:
    """Return the axes along which a step can scale."""
    return [
        axis
        for axis in label_axes(runs)
        if axis not in ("warmup", "ranks", *WORDS)
        and all(isinstance(axis_value(run.spec, axis), (int, float)) for run in runs)
    ]


def step_table(runs: Sequence[Run], title: str = "training step") -> Table:
    """One row per Run: what varied, the time, what it means, how it ended.

    What all Runs share is in the title or in the note.
    """
    axes = label_axes(runs)
    with_cv = "warmup" in axes
    several = len({run.ran.impls_text for run in runs if run.ran}) > 1
    columns = [Column(axis) for axis in axes]
    columns += [Column("step median", "ms")]
    columns += [Column("p10", "ms", dispensable=1), Column("p90", "ms", dispensable=1)]
    columns += [Column("spread", "%")]
    columns += [Column("cv", "%")] if with_cv else []
    columns += [Column(rate_name(runs)), Column("MFU", "%"), Column("peak memory", "GiB")]
    columns += [Column("ran", dispensable=2)] if several else []
    columns += [Column("status")]
    rows = []
    for run in runs:
        labels: list[Cell] = [axis_value(run.spec, axis) for axis in axes]
        ran = [run.ran.impls_text if run.ran else ""] if several else []
        rows.append((*labels, *_measured(run, with_cv), *ran, run.outcome))
    shared = shared_text([run.spec for run in runs]) if runs else ""
    full_title = f"{title}: {shared}" if shared else title
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
    shared = {run.ran.impls_text for run in runs if run.ran}
    if len(shared) == 1 and shared != {""}:
        lines[f"ran: {shared.pop()}"] = None
    lines |= dict.fromkeys(_formulas(runs))
    lines |= {f"peak memory: {run.memory.source}": None for run in runs if run.memory}
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


def _formulas(runs: Sequence[Run]) -> list[str]:
    """Return the formula of the FLOPs of every mode; of several, which Runs each belongs to."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.work and run.work.formula:
            groups.setdefault((run.spec.mode, run.work.formula), []).append(run)
    several = len({formula for _, formula in groups}) > 1
    lines = []
    for (mode, formula), group in groups.items():
        # Of what differs between the Runs, what those with this formula have in common.
        differing = set(varying_axes([run.spec for run in group])) | {"mode"}
        axes = [axis for axis in label_axes(runs) if axis not in differing] if several else []
        which = f", {axes_text(group[0].spec, axes)}" if axes else ""
        lines.append(f"FLOPs, {mode}{which}: {formula}")
    return lines


def phase_table(runs: Sequence[Run]) -> Table | None:
    """The typical step of each Run by phase, with its waits; None when nothing was measured."""
    timed = [run for run in runs if run.clock is not None and run.clock.step.values]
    seen = dict.fromkeys(name for run in timed if run.clock for name in run.clock.phases)
    names = sorted(seen, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
    if not timed:
        return None
    columns = [Column("step", "ms"), *(Column(name, "ms") for name in names)]
    columns += [Column("other", "ms"), Column("data wait", "ms", dispensable=1)]
    columns += [Column("host", "ms", dispensable=1), Column("device busy", "ms", dispensable=1)]
    columns += [Column("kernel launches", dispensable=1), Column("limit")]
    rows = []
    for run in timed:
        assert run.clock is not None
        one = run.clock.typical
        step = run.clock.step.values[one]
        spent = {name: at(samples, one) or 0.0 for name, samples in run.clock.phases.items()}
        phases: list[Cell] = [spent.get(name, "") for name in names]
        waited, host = at(run.clock.data_wait, one), at(run.clock.host, one)
        launches = run.ran.kernel_launches if run.ran else None
        busy = run.ran.device_busy_ms if run.ran else None
        other = max(0.0, step - sum(spent.values()))
        tail = (waited, host, busy, launches, limit_of(run))
        rows.append((*_labels(runs, run), step, *phases, other, *tail))
    note = (
        "all of one step, the one with the median time; phases: on the device; other: between "
        "them, on a CPU the wait for data too\nhost: time Python needed to issue the step; device "
        "busy: kernels of the profiled step"
    )
    table = Table("where the time goes", _columns(runs, columns), tuple(rows), note)
    return table.without_unknown_columns()


def at(samples: Samples, index: int) -> float | None:
    """Return one sample, None where it was not taken."""
    return samples.values[index] if index < len(samples) else None


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
    return (*(Column(axis) for axis in label_axes(runs)), *own)


def _labels(runs: Sequence[Run], run: Run) -> list[Cell]:
    return [axis_value(run.spec, axis) for axis in label_axes(runs)]


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
