"""Open a case: find the traces of a stored Run, or read a trace that somebody else recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from steplab.explain.case import Case
from steplab.record import Run
from steplab.spec import RunSpec
from steplab.spec.recipe import Recipe
from steplab.store import Store
from steplab.trace.analyse import analyse
from steplab.trace.load import load_trace
from steplab.trace.stored import analyse_run


def case_of_run(run: Run, store: Store | None = None) -> Case:
    """Return the case of a Run, with its traces where they lie in the store."""
    store = store or Store()
    return Case(run, analyse_run(run, store.runs / run.id), _others(run, store))


def case_of_trace(path: Path) -> Case:
    """Return the case of a trace file of any origin."""
    return Case(analysis=analyse(load_trace(path)))


def _others(run: Run, store: Store) -> tuple[Run, ...]:
    """Runs of the same step on the same machine that were measured with another recipe."""
    if not run.spec.recipe.techniques:
        return ()
    asked, device = _without_recipe(run.spec), run.environment.device_name
    return tuple(
        other
        for _, other in store.all()
        if isinstance(other, Run)
        and other.id != run.id
        and other.clock is not None
        and other.environment.device_name == device
        and _without_recipe(other.spec) == asked
    )


def _without_recipe(spec: RunSpec) -> RunSpec:
    """The spec without what does not change the work: recipe, number of steps, peak."""
    return replace(spec, recipe=Recipe(), steps=1, warmup=0, peak_tflops=None)
