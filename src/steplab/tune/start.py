"""The foot of the ladder: the baseline through its own gate, measured and profiled. No torch."""

from __future__ import annotations

from dataclasses import replace

from steplab.engine.gate.checks import run_checks
from steplab.engine.gate.opened import Opened
from steplab.engine.gate.remote import RemoteCandidate, Scout
from steplab.engine.isolate import Progress
from steplab.errors import MeasurementError, Unsupported
from steplab.record import Environment
from steplab.record.ladder import Check
from steplab.spec import RunSpec
from steplab.store import Store
from steplab.tune.champion import Champion, Detail, crowned
from steplab.tune.trying import Rules
from steplab.tune.view import View


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
