"""The foot of the ladder: where fp64 fits, and the baseline measured and profiled. No torch."""

from __future__ import annotations

from dataclasses import replace

from steplab.engine.gate.checks import run_checks
from steplab.engine.gate.opened import Opened
from steplab.engine.gate.remote import RemoteCandidate, Scout
from steplab.engine.gate.shapes import (
    TRUTH,
    GateShape,
    gentler,
    shapes_to_try,
    with_batch,
    without_dropout,
)
from steplab.engine.isolate import Progress
from steplab.errors import MeasurementError, Unsupported
from steplab.record import Environment
from steplab.record.ladder import Check
from steplab.spec import RunSpec
from steplab.store import Store
from steplab.tune.champion import Champion, Detail, crowned
from steplab.tune.state import LadderFolder
from steplab.tune.trying import Rules
from steplab.tune.view import View

# What candidates declare sooner or later; the first is the quickest to compute.
LIKELY = {"cuda": ("fp32", "bf16"), "cpu": ("fp32",)}


def find_shapes(
    scout: Scout,
    spec: RunSpec,
    also_batch: int | None,
    folder: LadderFolder,
    timeout: float,
    view: View,
) -> tuple[GateShape, ...]:
    """Return the shapes at which numerics are compared, with the truth of each in the folder."""
    shapes = folder.load_shapes()
    if not shapes:
        shape = _first_that_fits(scout, spec, timeout, view)
        shapes = [shape, with_batch(shape, also_batch)] if also_batch else [shape]
        if scout.has_dropout(shape.spec, timeout):
            shapes = [without_dropout(one) for one in shapes]
        if _carried_away(scout, shapes[0], timeout, view):
            shapes = [gentler(one) for one in shapes]
    for shape in shapes:
        problem = scout.reference(shape, TRUTH, timeout)
        if problem:
            raise MeasurementError(f"No speed-up could be verified {shape.words}: {problem}.")
        for dtype in LIKELY[spec.device]:  # fp64 finds more room before others are alive
            scout.reference(shape, dtype, timeout)
    folder.save_shapes(shapes)
    return tuple(shapes)


def _first_that_fits(scout: Scout, spec: RunSpec, timeout: float, view: View) -> GateShape:
    problems = []
    for shape in shapes_to_try(spec):
        where = shape.words or "at the step's own shape"
        view.stage(f"computing the truth in fp64, {where}")
        problem = scout.reference(shape, TRUTH, timeout)
        if not problem:
            return shape
        problems.append(f"{where}: {problem}")
    raise MeasurementError(
        f"No speed-up could be verified, for want of a truth in fp64 ({'; '.join(problems)}).",
        "Let the model run in fp64, or choose a smaller --batch.",
    )


def _carried_away(scout: Scout, shape: GateShape, timeout: float, view: View) -> bool:
    """Whether rounding moves the parameters so far from fp64 that anything would pass."""
    view.stage("computing the references")
    for dtype in LIKELY[shape.spec.device] if shape.spec.mode == "full" else ():
        if scout.reference(shape, dtype, timeout):
            continue
        blind = scout.cannot_tell(shape, dtype, timeout)
        if blind:
            view.say(f"update in {dtype}: {blind}: the gate takes smaller steps")
            return True
    return False


def start(
    spec: RunSpec,
    environment: Environment,
    scout: Scout,
    rules: Rules,
    store: Store,
    group: str,
    timeout: float,
    view: View,
) -> tuple[Champion, tuple[Check, ...]]:
    """Measure and profile the baseline; return it alive, with its own way through the gate."""
    view.stage("looking at it")
    dtype, problem = scout.look(spec, rules.shapes[0], timeout)
    view.stage("computing the references")
    for shape in rules.shapes if not problem else ():
        problem = problem or scout.reference(shape, dtype, timeout)
    view.stage("starting")
    if problem:
        raise MeasurementError(f"The baseline cannot be measured: {problem.rstrip('.')}.")
    candidate = RemoteCandidate(spec, environment, rules.spares)
    try:
        opened = opened_or_raise(candidate, rules, timeout, view.stage)
        opened = replace(opened, run=replace(opened.run, group=group))
        checks = (*opened.checks, *run_checks(opened.run, opened.waits, opened.waits, None))
        detail: Detail = "all" if rules.objective == "memory" else "modules"
        return crowned(candidate, opened, store, timeout, view.stage, detail), checks
    except BaseException:
        candidate.close()
        raise


def opened_or_raise(
    candidate: RemoteCandidate, rules: Rules, timeout: float, progress: Progress
) -> Opened:
    """Open a candidate without which the search cannot go on; the caller closes it."""
    opened = candidate.open(rules.shapes, rules.references, timeout, progress)
    run = opened.run
    if run.status != "ok":
        kind = Unsupported if run.status == "unsupported" else MeasurementError
        label = run.spec.recipe.label
        raise kind(f"The recipe {label} cannot be measured: {run.status}, {run.reason}")
    wrong = next((check for check in opened.checks if not check.passed), None)
    if wrong is not None:
        raise MeasurementError(
            f"No speed-up could be verified: the gate is red for {run.spec.recipe.label} itself "
            f"({wrong.name}: {wrong.detail})."
        )
    return opened
