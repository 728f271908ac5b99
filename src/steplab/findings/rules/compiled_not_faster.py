"""The compiled step is no faster than the eager one.

What it sees: a Run with `compile` and one of the same step without it, in the same store.
Why it costs: compiling takes seconds to minutes at every start and gains nothing here.
Remedy: leave `compile` out, or find what keeps it from fusing (graph breaks, or products that take
most of the step anyway).
When it is wrong: the two Runs were measured at different times; `bench step --alternate` measures
both in turns.
"""

from __future__ import annotations

from collections.abc import Mapping

from steplab.core import Finding, Recipe, Run, Settings, units
from steplab.findings.case import Case

# Two medians measured at different times must differ by more than this to mean anything.
MIN_GAIN = 0.03


def check(case: Case) -> Finding | None:
    """Compare with the newest Run of the same step without `compile`."""
    run, eager = case.run, _eager(case)
    if run is None or eager is None or eager.clock is None or run.clock is None:
        return None
    compiled_ms, eager_ms = case.step_ms, eager.clock.step.median
    if not compiled_ms >= (1 - MIN_GAIN) * eager_ms:
        return None
    evidence = [f"{eager.id}: {units.milliseconds(eager_ms)} without compile"]
    if run.compilation is not None and run.compilation.first_seconds:
        evidence.append(f"the first step took {run.compilation.first_seconds:.1f} s")
    if case.rows is not None:
        products = case.rows.labeled("category", lambda c: c.startswith(("matmul", "attention")))
        share = case.rows.ms(products) / max(case.rows.ms(case.rows.inside), 1e-9)
        evidence.append(f"products and attention are {units.percent(share)} of the work")
    return Finding(
        rule="compiled_not_faster",
        claim=f"compiled {units.milliseconds(compiled_ms)}, eager {units.milliseconds(eager_ms)}",
        evidence=tuple(evidence),
        remedy="leave compile out, or look for graph breaks and for work that cannot fuse",
        stake_ms=max(0.0, compiled_ms - eager_ms),
        why="compiling costs seconds at every start and gives nothing back here",
        gain_ms=max(0.0, compiled_ms - eager_ms),
    )


def _eager(case: Case) -> Run | None:
    """Return the newest of the other Runs whose recipe is this one without `compile`."""
    if case.run is None or "compile" not in case.run.spec.recipe.techniques:
        return None
    wanted = _without_compile(case.run.spec.recipe)
    same = [run for run in case.others if run.spec.recipe.techniques == wanted]
    return max(same, key=lambda run: run.id, default=None)


def _without_compile(recipe: Recipe) -> Mapping[str, Settings]:
    return {name: given for name, given in recipe.techniques.items() if name != "compile"}


RULE = check
