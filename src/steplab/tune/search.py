"""Tune: from a spec to a finished ladder with its recipe. No torch in this process."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import monotonic

from steplab.engine.gate.remote import Scout
from steplab.engine.gate.spares import Spares, room_for
from steplab.record import Environment
from steplab.record.ladder import Ladder
from steplab.spec import Recipe, RunSpec
from steplab.store import Store
from steplab.techniques.situation import Objective, where
from steplab.tune.climb import Climb
from steplab.tune.clock import SearchClock
from steplab.tune.gate_shapes import find_shapes
from steplab.tune.offers import impls_of, is_slow
from steplab.tune.start import start
from steplab.tune.state import LadderFolder, open_ladder
from steplab.tune.stopwatch import Stopwatch, added
from steplab.tune.trying import Rules
from steplab.tune.turns import seconds_of
from steplab.tune.view import View


@dataclass(frozen=True)
class Wish:
    """What a search is for, and what it may cost."""

    objective: Objective = "time"
    minutes: float = 8.0  # of this call; an interrupted search that goes on has them anew
    begun: float = field(default_factory=monotonic)  # when they began
    memory_limit: int | None = None  # bytes; None: what the device has
    also_batch: int | None = None  # another batch size at which numerics must hold
    against: Recipe | None = None  # what the winner is held against at the end


def tune(
    spec: RunSpec,
    wish: Wish,
    store: Store,
    scout: Scout,
    environment: Environment,
    view: View,
    spares: Spares,
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
        spares.size = room_for(environment)
        spares.fill()
    timeout, watch = clock.timeout(slow=False), Stopwatch(view, wish.begun)
    shapes = find_shapes(scout, spec, wish.also_batch, folder, timeout, watch)
    turns = seconds_of(clock.seconds)
    rules = Rules(wish.objective, wish.memory_limit, shapes, folder.references, spares, turns)
    watch.name = "baseline"
    baseline, checks = start(spec, environment, scout, rules, store, ladder.id, timeout, watch)
    if baseline.waits:
        many = f"waits for the device {len(baseline.waits)} times a step"
        view.say(f"the baseline {many}: {where(baseline.waits)}")
    at_foot = ladder.winner == spec.recipe
    ladder = replace(
        ladder,
        baseline_run=baseline.run.id,
        baseline_checks=checks,
        gate_shapes=tuple(shape.words or "at the step's own shape" for shape in shapes),
        known_ms=baseline.known_ms if at_foot else ladder.known_ms,
        first_impls=impls_of(baseline.run),
        waits=baseline.waits,
        parts=added(ladder.parts, watch.lap()),
    )
    folder.save(ladder)
    climb = Climb(ladder, folder, store, scout, rules, clock, watch)
    return climb.run(baseline, wish.against), folder
