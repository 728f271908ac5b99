"""Tune: from a spec to a finished ladder with its recipe. No torch in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from steplab.core import Environment, Recipe, RunSpec
from steplab.core.errors import MeasurementError
from steplab.core.ladder import Ladder
from steplab.store import Store
from steplab.techniques.context import Objective, format_waits
from steplab.tune.climb import Climb, open_baseline
from steplab.tune.clock import SearchClock
from steplab.tune.folder import LadderFolder, open_ladder
from steplab.tune.proposals import impls_of, is_slow
from steplab.tune.rung import GateOptions
from steplab.tune.view import Stopwatch, View, add_timings
from steplab.verify.remote import ReferenceWorker
from steplab.verify.shapes import (
    TRUTH,
    GateShape,
    shapes_to_try,
    with_batch,
    with_smaller_steps,
    without_dropout,
)
from steplab.workers.alternate import seconds_per_rung
from steplab.workers.pool import WorkerPool, pool_size

LIKELY_DTYPES = ("fp32", "bf16")  # what candidates declare sooner or later; the quicker one first


def find_shapes(
    scout: ReferenceWorker,
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
        if spec.mode == "full":
            shapes = _with_steps_that_decide(scout, shapes, timeout, view)
    for shape in shapes:
        problem = scout.reference(shape, TRUTH, timeout)
        if problem:
            raise MeasurementError(f"No speed-up could be verified {shape.words}: {problem}.")
        for dtype in LIKELY_DTYPES if spec.device == "cuda" else ():  # while there is room for fp64
            scout.reference(shape, dtype, timeout)
    folder.save_shapes(shapes)
    return tuple(shapes)


def _first_that_fits(
    scout: ReferenceWorker, spec: RunSpec, timeout: float, view: View
) -> GateShape:
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


def _with_steps_that_decide(
    scout: ReferenceWorker, shapes: list[GateShape], timeout: float, view: View
) -> list[GateShape]:
    """Return the shapes, with smaller steps where only after these right and wrong differ."""
    view.stage("computing the references")
    smaller = [with_smaller_steps(shape) for shape in shapes]
    for dtype in LIKELY_DTYPES:
        blind = _why_undecided(scout, shapes, dtype, timeout)
        if not blind:
            continue
        if not _why_undecided(scout, smaller, dtype, timeout):
            view.say(f"update in {dtype}: {blind}: the gate takes smaller steps")
            return smaller
        view.say(f"update in {dtype}: {blind}, also after smaller steps")
    return shapes


def _why_undecided(
    scout: ReferenceWorker, shapes: Sequence[GateShape], dtype: str, timeout: float
) -> str:
    """Return why even an honest update in `dtype` would not pass at one of the shapes, or ""."""
    for shape in shapes:
        if scout.reference(shape, TRUTH, timeout) or scout.reference(shape, dtype, timeout):
            continue
        reason = scout.why_undecided(shape, dtype, timeout)
        if reason:
            return reason
    return ""


@dataclass(frozen=True)
class TuneOptions:
    """What a search is for, and what it may cost."""

    objective: Objective = "time"
    minutes: float = 8.0  # of this call; an interrupted search that goes on has them anew
    begun: float = field(default_factory=monotonic)  # when they began
    memory_limit: int | None = None  # bytes; None: what the device has
    also_batch: int | None = None  # another batch size at which numerics must hold
    against: Recipe | None = None  # what the winner is held against at the end


def tune(
    spec: RunSpec,
    wish: TuneOptions,
    store: Store,
    scout: ReferenceWorker,
    environment: Environment,
    view: View,
    spares: WorkerPool,
) -> tuple[Ladder, LadderFolder]:
    """Climb the ladder of `spec` and return it, finished, with its folder.

    A ladder of the same step that was interrupted on this machine is continued. The caller closes
    `spares`.
    """
    gate = (wish.objective, wish.also_batch, wish.memory_limit)
    folder, ladder = open_ladder(store, spec, environment, *gate)
    if ladder.rungs:
        view.say(f"going on with the ladder begun {ladder.created}: {len(ladder.rungs)} rungs")
        for rung in ladder.rungs:
            view.rung(rung)
    clock = SearchClock(wish.minutes * 60, wish.begun, ladder.seconds)
    for rung in ladder.rungs:
        clock.note(is_slow(rung.recipe), rung.seconds)
    scout.references = folder.references
    if spec.device == "cuda":  # the truth in fp64 comes next: nothing is timed
        spares.size = pool_size(environment)
        spares.fill()
    timeout, watch = clock.timeout(slow=False), Stopwatch(view, wish.begun)
    shapes = find_shapes(scout, spec, wish.also_batch, folder, timeout, watch)
    turns = seconds_per_rung(clock.seconds)
    rules = GateOptions(wish.objective, wish.memory_limit, shapes, folder.references, spares, turns)
    watch.name = "baseline"
    baseline, checks = open_baseline(
        spec, environment, scout, rules, store, ladder.id, timeout, watch
    )
    if baseline.waits:
        many = f"waits for the device {len(baseline.waits)} times a step"
        view.say(f"the baseline {many}: {format_waits(baseline.waits)}")
    at_foot = ladder.winner == spec.recipe
    ladder = replace(
        ladder,
        baseline_run=baseline.run.id,
        baseline_checks=checks,
        gate_shapes=tuple(shape.words or "at the step's own shape" for shape in shapes),
        known_ms=baseline.known_ms if at_foot else ladder.known_ms,
        first_impls=impls_of(baseline.run),
        waits=baseline.waits,
        parts=add_timings(ladder.parts, watch.lap()),
    )
    folder.save(ladder)
    climb = Climb(ladder, folder, store, scout, rules, clock, watch)
    return climb.run(baseline, wish.against), folder
