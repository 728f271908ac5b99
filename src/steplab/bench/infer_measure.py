"""One cell: build the model, check the cached forecasts, time the calls. Imports torch."""

# B series, T points
from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steplab.bench.infer import MODEL
from steplab.core import RunSpec, Samples
from steplab.core.errors import MeasurementError, Unsupported
from steplab.forecasting.forecaster import Forecaster
from steplab.step.assemble import assemble
from steplab.techniques.recipes import technique
from steplab.techniques.technique import Stage

CHECKED_SERIES = 16  # forecast in fp64 too, to know how large an error rounding makes


class Latencies(NamedTuple):
    """Milliseconds of every call: numpy in, numpy out, all of the host's work included."""

    cached: Samples
    uncached: Samples


class ForecastTimer:
    """Measures cells; a model is kept until a cell needs another one."""

    def __init__(self) -> None:
        self.built: tuple[RunSpec, Forecaster] | None = None

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
        return Latencies(*(_marked(values) for values in zip(*pairs, strict=True)))

    def _forecaster(self, spec: RunSpec) -> Forecaster:
        wanted = model_spec(spec)
        if self.built is None or self.built[0] != wanted:
            self.built = None  # first: two large models may not fit side by side
            self.built = (wanted, build(wanted))
        return self.built[1]


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


def build(spec: RunSpec) -> Forecaster:
    """Return a Forecaster with fresh weights; their values do not change how long it takes."""
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


def _marked(values: tuple[float, ...]) -> Samples:
    samples = Samples(values, "ms")
    return replace(samples, marks={str(i): "slow, no cause seen" for i in samples.slow_indices()})


def _relative_error(found: NDArray[np.float64], truth: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def free_memory() -> None:
    """Give memory back after a failed cell."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
