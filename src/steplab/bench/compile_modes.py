"""What each mode of torch.compile costs at the start and gives per step. No torch."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from steplab.core import Cell, Column, Recipe, Run, RunSpec, Table
from steplab.core.errors import UserError
from steplab.core.spec import shared_text
from steplab.techniques.recipes import check_recipe

CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
MODES: tuple[str, ...] = get_args(CompileMode)
EAGER = "eager"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # where compiled code is kept
NOTE = (
    "cold: the first step with empty compile caches; warm: the first step of another process, with "
    "the caches filled by the first; pays after: steps until the cold start is made up for"
)


@dataclass(frozen=True)
class ModeRuns:
    """A mode's Runs: the first with empty caches, the second (None for eager) with filled ones."""

    mode: str
    cold: Run
    warm: Run | None = None


def mode_specs(spec: RunSpec, scope: str, modes: Sequence[str]) -> dict[str, RunSpec]:
    """Return the step without compile, then compiled in every mode."""
    if "compile" in spec.recipe.techniques:
        raise UserError(
            "The recipe compiles already, and this command compares the ways to.",
            "Leave compile out of --recipe.",
        )
    specs = {EAGER: spec}
    for mode in modes:
        settings = {"scope": scope, "mode": mode}
        recipe = Recipe({**spec.recipe.techniques, "compile": settings})
        check_recipe(recipe)
        specs[mode] = replace(spec, recipe=recipe)
    return specs


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Give the workers that start inside empty caches of their own."""
    kept = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(prefix="steplab-compile-") as folder:
        os.environ |= {name: os.path.join(folder, name.split("_")[0].lower()) for name in CACHES}
        try:
            yield
        finally:
            for name, value in kept.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def mode_table(found: Sequence[ModeRuns]) -> Table:
    """Return one row per mode: seconds at the start, time of a step, and when it pays."""
    eager = next((one.cold for one in found if one.mode == EAGER), None)
    base = eager.clock.step.median if eager and eager.clock else None
    columns = (
        Column("mode"),
        Column("cold", "s", 3),
        Column("warm", "s", 3),
        Column("step", "ms"),
        Column("spread", "%", 2, dispensable=2),
        Column("speed-up", "", 3),
        Column("pays after", "steps"),
        Column("peak memory", "GiB", 3, dispensable=1),
        Column("graphs", dispensable=3),
        Column("status"),
    )
    rows = tuple((one.mode, *_measured(one, base)) for one in found)
    specs = [one.cold.spec for one in found]
    title = f"ways to compile {specs[0].workload}: {shared_text(specs)}"
    first = found[0].cold
    note = f"{first.environment.conditions_on(first.spec.device)}\n{NOTE}"
    return Table(title, columns, rows, note).without_unknown_columns()


def _measured(one: ModeRuns, eager_ms: float | None) -> list[Cell]:
    run = one.cold
    if run.clock is None or run.status != "ok":
        return [*[None] * 8, f"{run.status}: {run.reason}"]
    step, compiled = run.clock.step, run.compilation
    cold = compiled.first_seconds if compiled else None
    filled = one.warm.compilation if one.warm else None
    faster = eager_ms / step.median if eager_ms else None
    cautions = (text.split(":")[0] for text in run.clock.cautions())
    return [
        cold,
        filled.first_seconds if filled else None,
        step.median,
        step.spread * 100,
        faster,
        _pays_after(cold, eager_ms, step.median),
        run.memory.peak / 2**30 if run.memory else None,
        compiled.graphs if compiled else None,
        ", ".join(["ok", *cautions]),
    ]


def _pays_after(cold_s: float | None, eager_ms: float | None, step_ms: float) -> Cell:
    if cold_s is None or eager_ms is None:
        return ""
    saved_ms = eager_ms - step_ms
    return round(cold_s * 1e3 / saved_ms) if saved_ms > 0 else "never"
