"""The tables below the main one: where the time goes, how well it is used, what was compiled."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.compare.axes import axis_value, varying_axes
from steplab.record import Column, Counters, Run, Samples, Table
from steplab.record.table import Cell


def phase_table(runs: Sequence[Run]) -> Table | None:
    """Median milliseconds per phase, data wait and host time; None when nothing was measured."""
    timed = [run for run in runs if run.clock is not None]
    names = dict.fromkeys(name for run in timed if run.clock for name in run.clock.phases)
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


def utilisation_table(runs: Sequence[Run]) -> Table | None:
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
