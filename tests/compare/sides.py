"""Runs for comparisons."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steplab.compare.inputs import Side
from steplab.core import Clock, Environment, Memory, Ran, Recipe, Run, RunSpec, Samples, Work

ENVIRONMENT = Environment("0.1.0", "3.11", "Linux", "A CPU", 2, None, torch="2.13")


def run_of(
    values=(10.0,) * 10, name="run-a", config=None, recipe=None, environment=ENVIRONMENT, **fields
) -> Run:
    """Return a Run whose steps took `values` ms; other keywords change its spec."""
    spec = RunSpec(
        fields.pop("workload", "gpt"),
        {"context": 128, "width": 64, **(config or {})},
        "tiny",
        recipe=Recipe(recipe or {}),
        **fields,
    )
    steps = Samples(tuple(values), "ms")
    phases = {
        "forward": Samples(tuple(v / 4 for v in values), "ms"),
        "backward": Samples(tuple(v / 2 for v in values), "ms"),
    }
    clock = Clock(steps, steps, Samples((), "ms"), phases, {}, sum(values), "perf_counter")
    return Run(
        name,
        spec,
        environment,
        clock=clock,
        memory=Memory(0, 2**30, None, None, "process resident set"),
        work=Work(4 * spec.config["context"], 1e9, 1e9, 1e9),
        parameters=1000,
        ran=Ran({"attention": ("flash",)}),
    )


def noisy(median, count=30, spread=0.01, seed=0) -> tuple[float, ...]:
    """Return samples around `median` with a relative standard deviation of `spread`."""
    return tuple(np.random.default_rng(seed).normal(median, median * spread, count))


def side(run: Run, analysis=None, **changes) -> Side:
    changed = replace(run, **changes)
    return Side(changed.id, changed, (analysis,) if analysis else ())
