"""How fast a model forecasts: latency per call and series per second, cached and uncached."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from steplab.core import (
    Cell,
    Clock,
    Column,
    Environment,
    Recipe,
    Run,
    RunSpec,
    Samples,
    Status,
    Table,
    fingerprint,
    new_run_id,
)
from steplab.core.errors import MeasurementError, Unsupported, UserError
from steplab.core.run import now
from steplab.store import Store, open_sweep
from steplab.workloads.workload import find_workload

WORKLOAD = "forecast"  # what the Runs are called; the model is the workload of `MODEL`
MODEL = "tsmoe"


@dataclass(frozen=True)
class Grid:
    """The values of every axis; every cell is measured with the cache and without it, in turns."""

    sizes: Sequence[str]
    batches: Sequence[int]  # series per call
    horizons: Sequence[int]  # points to forecast
    context: int  # points of the past
    recipes: Sequence[Recipe]
    device: str
    calls: int = 30
    warmup: int = 3
    seed: int = 42

    def __post_init__(self) -> None:
        counts = {"batch": self.batches, "horizon": self.horizons, "context": [self.context]}
        for name, values in {**counts, "calls": [self.calls]}.items():
            if min(values) < 1:
                raise UserError(f"--{name} must be at least 1, not {min(values)}.")
        if self.warmup < 0:
            raise UserError(f"--warmup must not be negative, but is {self.warmup}.")


def plan(grid: Grid) -> list[RunSpec]:
    """Return one spec per cell; a model and its recipe outermost, so that it is built once."""
    entry = find_workload(MODEL)
    specs = []
    for size, recipe in itertools.product(grid.sizes, grid.recipes):
        model = entry.resolve(size, {"seq_max_len": _positions(entry.resolve(size, {}), grid)})
        for batch, horizon in itertools.product(grid.batches, grid.horizons):
            specs.append(
                RunSpec(
                    WORKLOAD,
                    {"model": model, "horizon": horizon, "context": grid.context},
                    size,
                    batch=batch,
                    mode="infer",
                    recipe=recipe,
                    device=grid.device,
                    steps=grid.calls,
                    warmup=grid.warmup,
                    seed=grid.seed,
                )
            )
    return specs


def _positions(model: dict[str, Any], grid: Grid) -> int:
    """Return positions for the context and everything fed back, so that nothing is cut."""
    longest_head = max(int(word) for word in model["horizons"].split(","))
    points = max(grid.context + max(grid.horizons), longest_head + 1)
    patch: int = model["patch_length"]
    return -(-points // patch) * patch


if TYPE_CHECKING:
    from steplab.bench.infer_measure import ForecastTimer, Latencies

CALLS = "calls"  # the table of a Run that keeps every call; its clock has the cached ones


def sweep(
    specs: Sequence[RunSpec], store: Store, environment: Environment, command: Sequence[str] = ()
) -> Iterator[Run]:
    """Yield a Run for every spec, in order; each is stored before it is yielded.

    Cells that an interrupted sweep of the same specs has finished are read, not measured again.
    """
    from steplab.bench.infer_measure import ForecastTimer

    current = open_sweep(store, specs, environment)
    bench = ForecastTimer()
    for spec in specs:
        run = current.finished.get(fingerprint(spec))
        if run is None:
            run = replace(
                _measured(spec, bench, environment), group=current.id, command=tuple(command)
            )
            store.save(run)
        yield run


def _measured(spec: RunSpec, bench: ForecastTimer, environment: Environment) -> Run:
    run = Run(new_run_id(spec), spec, environment, created=now())
    try:
        latencies = bench.latencies(spec)
    except UserError:
        raise
    except Exception as error:
        status, reason = _failure(error)
        return replace(run, status=status, reason=reason)
    cached, none = latencies.cached, Samples((), "ms")
    total = sum(cached.values)
    clock = Clock(cached, cached, none, {}, {}, window_ms=total, source="perf_counter")
    return replace(run, clock=clock, tables={CALLS: _calls(latencies)})


def _calls(latencies: Latencies) -> Table:
    columns = (Column("cached", "ms"), Column("uncached", "ms"))
    rows = tuple(zip(latencies.cached.values, latencies.uncached.values, strict=True))
    return Table("every call, in turns", columns, rows)


def _failure(error: Exception) -> tuple[Status, str]:
    from steplab.bench.infer_measure import free_memory
    from steplab.step.trial import is_out_of_memory

    reason = " ".join(str(error).split()).split(". ")[0][:200] or type(error).__name__
    if is_out_of_memory(error) or "Out of memory" in reason:
        free_memory()
        return "oom", reason
    if isinstance(error, Unsupported):
        return "unsupported", reason
    if isinstance(error, MeasurementError):
        return "failed", reason
    return "failed", f"{type(error).__name__}: {reason}"


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
