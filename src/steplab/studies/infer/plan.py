"""Which cells are measured. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from steplab.errors import UserError
from steplab.spec import Recipe, RunSpec
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
        model = entry.resolve(size, {"seq_max_len": _room(entry.resolve(size, {}), grid)})
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


def _room(model: dict[str, Any], grid: Grid) -> int:
    """Return positions for the context and everything fed back, so that nothing is cut."""
    longest_head = max(int(word) for word in model["horizons"].split(","))
    points = max(grid.context + max(grid.horizons), longest_head + 1)
    patch: int = model["patch_length"]
    return -(-points // patch) * patch
