"""How fast a model forecasts: latency per call and series per second, cached and uncached.

Planning and tables need no torch; the model is built, checked and timed in this process.
"""

# B series, T points
from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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
)
from steplab.core.errors import MeasurementError, Unsupported, UserError
from steplab.core.run import new_run
from steplab.workers.client import Progress
from steplab.workloads.workload import find_workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from steplab.forecasting.forecaster import Forecaster

WORKLOAD = "forecast"  # the workload of the Runs; the model is one of `MODEL`
MODEL = "tsmoe"
CALLS = "calls"  # the table of a Run that keeps every call; its clock has the cached ones
CHECKED_SERIES = 16  # forecast in fp64 too, to know how large an error rounding makes
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
    """Return one spec per cell; models and recipes outermost, so that each model is built once."""
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
    """Return positions for the context and everything fed back, so that nothing is cut off."""
    longest_head = max(int(word) for word in model["horizons"].split(","))
    points = max(grid.context + max(grid.horizons), longest_head + 1)
    patch: int = model["patch_length"]
    return -(-points // patch) * patch


class Latencies(NamedTuple):
    """Milliseconds of every call: numpy in, numpy out, all of the host's work included."""

    cached: Samples
    uncached: Samples


class ForecastTrials:
    """Measures cells in this process; keeps the model until a cell needs another one."""

    def __init__(self) -> None:
        self.built: tuple[RunSpec, Forecaster] | None = None

    def trial(self, spec: RunSpec, environment: Environment, key: str, progress: Progress) -> Run:
        """Return the Run of a cell; a failure is its status."""
        run = new_run(spec, environment)
        progress("timing")
        try:
            latencies = self.latencies(spec)
        except UserError:
            raise
        except Exception as error:
            status, reason = _failure(error)
            return replace(run, status=status, reason=reason)
        cached, none = latencies.cached, Samples((), "ms")
        total = sum(cached.values)
        clock = Clock(cached, cached, none, {}, {}, window_ms=total, source="perf_counter")
        columns = (Column("cached", "ms"), Column("uncached", "ms"))
        rows = tuple(zip(cached.values, latencies.uncached.values, strict=True))
        calls = Table("every call, in turns", columns, rows)
        return replace(run, clock=clock, tables={CALLS: calls})

    def latencies(self, spec: RunSpec) -> Latencies:
        """Time calls with the cache and without it in turns, so that drift cannot decide."""
        forecaster = self._forecaster(spec)
        check_cached(forecaster, spec)
        contexts_BT = random_contexts(spec.batch, spec.config["context"], spec.seed)
        horizon = spec.config["horizon"]

        def call(cached: bool) -> float:
            start = perf_counter()
            forecaster.predict(contexts_BT, horizon, batch=spec.batch, cached=cached)
            return (perf_counter() - start) * 1e3

        for _ in range(spec.warmup):
            call(cached=True), call(cached=False)
        pairs = [(call(cached=True), call(cached=False)) for _ in range(spec.steps)]
        columns = zip(*pairs, strict=True)
        return Latencies(*(Samples(column, "ms").with_slow_marked() for column in columns))

    def _forecaster(self, spec: RunSpec) -> Forecaster:
        wanted = model_spec(spec)
        if self.built is None or self.built[0] != wanted:
            self.built = None  # first: two large models may not fit side by side
            self.built = (wanted, build_forecaster(wanted))
        return self.built[1]


def _failure(error: Exception) -> tuple[Status, str]:
    import torch

    from steplab.step.failures import first_sentence, is_out_of_memory

    reason = first_sentence(error)
    if is_out_of_memory(error) or "Out of memory" in reason:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return "oom", reason
    if isinstance(error, Unsupported):
        return "unsupported", reason
    if isinstance(error, MeasurementError):
        return "failed", reason
    return "failed", f"{type(error).__name__}: {reason}"


def model_spec(spec: RunSpec) -> RunSpec:
    """Return the spec of the model that a cell needs: the same for all cells that share it."""
    return RunSpec(
        MODEL,
        spec.config["model"],
        spec.size,
        mode="infer",
        recipe=spec.recipe,
        device=spec.device,
        seed=spec.seed,
    )


def build_forecaster(spec: RunSpec) -> Forecaster:
    """Return a Forecaster with fresh weights; their values do not change how long it takes."""
    from steplab.forecasting.forecaster import Forecaster
    from steplab.step.assemble import assemble
    from steplab.techniques.recipes import technique
    from steplab.techniques.technique import Stage

    for name in spec.recipe.techniques:
        if technique(name).stage not in (Stage.IMPLEMENTATION, Stage.PRECISION):
            raise Unsupported(f"forecasts do not run under {name}: every call has other shapes")
    parts = assemble(spec).parts
    return Forecaster(parts.model, spec.size, parts.forward_context, warn=lambda text: None)  # type: ignore[arg-type]


def random_contexts(batch: int, points: int, seed: int) -> NDArray[np.float64]:
    """Return seeded random walks, shape (batch, points)."""
    return np.random.default_rng(seed).standard_normal((batch, points)).cumsum(1)


def check_cached(forecaster: Forecaster, spec: RunSpec) -> None:
    """Raise unless cached forecasts are about as close to those in fp64 as uncached ones are.

    The budget is twice the error of the uncached ones, and one rounding to fp32.
    """
    from steplab.forecasting.forecaster import Forecaster

    contexts_BT = random_contexts(CHECKED_SERIES, spec.config["context"], spec.seed)
    horizon = spec.config["horizon"]
    exact = Forecaster(
        copy.deepcopy(forecaster.model).double(), "fp64", contextlib.nullcontext, lambda text: None
    )
    truth = exact.predict(contexts_BT, horizon, cached=False).mean_BH
    own, peer = (
        _relative_error(forecaster.predict(contexts_BT, horizon, cached=cached).mean_BH, truth)
        for cached in (True, False)
    )
    budget = 2 * peer + float(np.finfo(np.float32).eps)
    if not own <= budget:
        raise MeasurementError(
            f"cached forecasts differ: their error is {own:.1e}, the budget {budget:.1e}"
        )


def _relative_error(found: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def infer_table(runs: Sequence[Run]) -> Table:
    """Return one row per Run; the reasons of failed rows stand below."""
    first = runs[0]
    calls = f"{first.spec.steps} calls each per cell after {first.spec.warmup} untimed ones"
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
