"""Tune: from a spec to a finished ladder with its recipe. No torch in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steplab.core import Environment, RunSpec
from steplab.core.errors import MeasurementError
from steplab.core.ladder import Ladder
from steplab.store import Store
from steplab.techniques.context import format_waits
from steplab.tune.champion import Champion, Detail, open_champion
from steplab.tune.climb import Climb, note_seconds
from steplab.tune.folder import LadderFolder, open_ladder
from steplab.tune.larger_batch import LargerBatches
from steplab.tune.options import GateOptions, TuneOptions
from steplab.tune.progress import (
    SearchClock,
    Stopwatch,
    View,
    add_timings,
    without_references,
)
from steplab.tune.proposals import impls_of, is_slow
from steplab.verify.choice import choose_shapes
from steplab.verify.remote import ReferenceWorker
from steplab.verify.shapes import LIKELY_DTYPES, TRUTH, GateShape
from steplab.workers.alternate import seconds_per_rung
from steplab.workers.pool import WorkerPool, pool_size


def tune(
    spec: RunSpec,
    options: TuneOptions,
    store: Store,
    references: ReferenceWorker,
    environment: Environment,
    view: View,
    pool: WorkerPool,
) -> tuple[Ladder, LadderFolder]:
    """Climb the ladder of `spec` and return it, finished, with its folder.

    A ladder of the same step that was interrupted on this machine is continued. The caller closes
    `references` and `pool`.
    """
    folder, ladder = open_ladder(store, spec, environment, options)
    if ladder.rungs:
        view.say(f"going on with the ladder begun {ladder.created}: {len(ladder.rungs)} rungs")
        for rung in ladder.rungs:
            view.rung(rung)
    clock = SearchClock(options.minutes * 60, options.begun, ladder.seconds)
    for rung in ladder.rungs:
        note_seconds(clock, rung)
    references.folder = folder.references
    if spec.device == "cuda":  # the truth in fp64 comes next: nothing is timed
        pool.size = pool_size(environment, spec.ranks)
        pool.fill()
    timeout, watch = clock.timeout, Stopwatch(view, options.begun)
    shapes = find_shapes(references, spec, options.also_batch, folder, timeout, watch)
    gate = GateOptions(
        options.objective,
        options.memory_limit,
        shapes,
        folder.references,
        pool,
        turns_seconds=seconds_per_rung(clock.seconds),
    )
    parts = add_timings(ladder.parts, watch.lap("baseline"))
    baseline = _open_baseline(spec, ladder, gate, references, store, timeout, watch)
    taken = watch.lap()
    clock.note(is_slow(spec.recipe), without_references(taken))  # a candidate takes about as long
    try:
        ladder = replace(ladder, parts=add_timings(parts, taken))
        ladder = _with_baseline(ladder, baseline, shapes)
        folder.save(ladder)
    except BaseException:
        baseline.candidate.close()
        raise
    climb = Climb(ladder, folder, store, references, gate, clock, watch)
    ladder = climb.run(baseline, options.against or ladder.own, settle=not options.larger_batches)
    if options.larger_batches:
        winner, watch.name = climb.champion, "larger batches"
        study = LargerBatches(
            winner.run, options.allowed, winner.waits, gate, references, store, clock, watch
        )
        ladder = replace(ladder, batches=study.run())
        ladder = replace(ladder, parts=add_timings(ladder.parts, watch.lap()))
    # Not before: what is interrupted goes on with a ladder that is not finished.
    ladder = replace(ladder, finished=not ladder.left, seconds=clock.total)
    folder.save(ladder)
    return ladder, folder


def _open_baseline(
    spec: RunSpec,
    ladder: Ladder,
    gate: GateOptions,
    references: ReferenceWorker,
    store: Store,
    timeout: float,
    view: View,
) -> Champion:
    """Measure and profile the recipe that the search starts from; it is the first champion."""
    shapes, problem = references.prepare(spec, gate.shapes, timeout, view.stage)
    gate = replace(gate, shapes=shapes)
    view.stage("starting")
    if problem:
        reason = problem.message.rstrip(".")
        raise MeasurementError(f"The baseline cannot be measured: {reason}.", problem.suggestion)
    detail: Detail = "all" if gate.objective == "memory" else "modules"
    baseline = open_champion(spec, ladder, gate, store, timeout, view.stage, detail)
    if baseline.run.clock is not None and baseline.run.clock.contention:
        view.say(f"the baseline is {baseline.run.clock.contention}")
    if baseline.waits:
        many = f"waits for the device {len(baseline.waits)} times a step"
        view.say(f"the baseline {many}: {format_waits(baseline.waits)}")
    return baseline


def _with_baseline(ladder: Ladder, baseline: Champion, shapes: Sequence[GateShape]) -> Ladder:
    nothing_won = ladder.winner == ladder.spec.recipe  # what is known is known of the winner
    work = baseline.run.work
    return replace(
        ladder,
        baseline_run=baseline.run.id,
        baseline_checks=baseline.checks,
        gate_shapes=tuple(shape.words or "at the step's own shape" for shape in shapes),
        known_ms=baseline.known_ms if nothing_won else ladder.known_ms,
        first_impls=impls_of(baseline.run),
        waits=baseline.waits,
        padding=work.padding if work else 0.0,
        padding_told_by=work.padding_told_by if work else "",
        contention=baseline.run.clock.contention if baseline.run.clock else "",
    )


def find_shapes(
    references: ReferenceWorker,
    spec: RunSpec,
    also_batch: int | None,
    folder: LadderFolder,
    timeout: float,
    view: View,
) -> tuple[GateShape, ...]:
    """Return the shapes at which numerics are compared, with the truth of each in the folder."""
    shapes = folder.load_shapes(spec)
    if not shapes:
        shapes = choose_shapes(references, spec, also_batch, timeout, view.stage, view.say)
    for shape in shapes:
        problem = references.reference(shape, TRUTH, timeout)
        if problem:
            raise MeasurementError(f"No speed-up could be verified {shape.words}: {problem}.")
        for dtype in LIKELY_DTYPES if spec.device == "cuda" else ():  # while there is room for fp64
            references.reference(shape, dtype, timeout)
    folder.save_shapes(shapes)
    return tuple(shapes)
