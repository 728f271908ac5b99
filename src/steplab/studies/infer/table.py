"""The table of a study of forecasts, from its Runs. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.record import Column, Run, Samples, Table
from steplab.record.table import Cell
from steplab.studies.infer.study import CALLS

PERCENTILES = (50, 90, 99)
METHOD = (
    "ms per call of Forecaster.predict, numpy in and numpy out, with the cache and without it in "
    "turns; series/s = batch / p50\n"
    "gain = uncached p50 / cached p50; cached forecasts were compared with fp64 first"
)
COLUMNS = (
    *map(Column, ("size", "recipe", "batch", "context", "horizon")),
    *(Column(f"p{q}", "ms") for q in PERCENTILES),
    Column("series/s"),
    *(Column(f"uncached p{q}", "ms") for q in PERCENTILES),
    Column("gain", "x", digits=3),
    Column("status"),
)


def infer_table(runs: Sequence[Run]) -> Table:
    """One row per Run; reasons of failed rows stand below."""
    first = runs[0]
    calls = f"{first.spec.steps} calls per cell and way after {first.spec.warmup} untimed ones"
    reasons = dict.fromkeys(f"{run.status}: {run.reason}" for run in runs if run.reason)
    notes = [first.environment.conditions_on(first.spec.device), f"{METHOD}; {calls}", *reasons]
    rows = tuple(_row(run) for run in runs)
    return Table(f"forecasts on {first.spec.device}", COLUMNS, rows, "\n".join(notes))


def _row(run: Run) -> tuple[Cell, ...]:
    spec, config = run.spec, run.spec.config
    about = (spec.size, spec.recipe.label, spec.batch, config["context"], config["horizon"])
    if run.clock is None:
        return (*about, *[None] * (2 * len(PERCENTILES) + 2), run.status)
    cached, uncached = run.clock.step, uncached_calls(run)
    speed = spec.batch / cached.median * 1e3
    gain = uncached.median / cached.median
    return (*about, *_percentiles(cached), speed, *_percentiles(uncached), gain, run.status)


def uncached_calls(run: Run) -> Samples:
    """Return the calls without the cache of a measured Run."""
    column = [row[1] for row in run.tables[CALLS].rows]
    return Samples(tuple(value for value in column if isinstance(value, float)), "ms")


def _percentiles(samples: Samples) -> tuple[float, ...]:
    return tuple(samples.percentile(q) for q in PERCENTILES)
