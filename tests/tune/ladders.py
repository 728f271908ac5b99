"""Searches without processes: a simulated step whose time depends on its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from steplab.core import (
    Budget,
    Category,
    Memory,
    Profile,
    Run,
    RunSpec,
    Samples,
    StepBudget,
    registry,
)
from steplab.core.errors import MeasurementError, Unsupported
from steplab.core.ladder import Check
from steplab.techniques.context import Suggestion
from steplab.techniques.technique import Stage, Technique
from steplab.tune.champion import Champion
from steplab.tune.progress import NullView
from steplab.verify.remote import CandidateResult, ReferenceWorker
from steplab.workers.pool import WorkerPool
from tests.compare.sides import ENVIRONMENT, run_of

BASE_MS = 100.0


class Interrupted(NullView):
    """Presses Ctrl-C after so many rungs."""

    def __init__(self, after: int) -> None:
        self.after = after

    def rung(self, rung) -> None:
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt


@dataclass
class World:
    """What every simulated technique does to a step: a factor of its time, or a failure."""

    factors: dict[str, float] = field(default_factory=dict)
    red: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)  # technique -> status
    diverging: set[str] = field(default_factory=set)  # after many steps
    refused: set[str] = field(default_factory=set)
    lost_in_turns: set[str] = field(default_factory=set)
    together: dict[frozenset[str], float] = field(default_factory=dict)  # extra factors
    opened: list[str] = field(default_factory=list)
    timeouts: dict[str, float] = field(default_factory=dict)  # seconds, by recipe
    details: list[str] = field(default_factory=list)  # of the profiles
    alive: int = 0
    noise: float = 0.0  # of a round's time, as a share of it
    quiet_rounds: int = 0  # before it begins
    now: float = 0.0  # by a clock that `use_clock` shows
    open_seconds: float = 0.0  # that opening a candidate takes; one that times out takes all it may
    seed: int = 1  # of the noise

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def mood(self) -> float:
        """Return the factor of one side's next round."""
        self.quiet_rounds -= 1
        return 1.0 if self.quiet_rounds >= 0 else float(np.exp(self.random.normal(0, self.noise)))

    def ms(self, names: frozenset[str]) -> float:
        ms = BASE_MS
        for name in names:
            ms *= self.factors.get(name, 1.0)
        for both, factor in self.together.items():
            ms *= factor if both <= names else 1.0
        return ms


@dataclass(frozen=True)
class Settings:
    on: bool = True


class FakeTechnique(Technique):
    """Suggests itself with a savings."""

    stage = Stage.IMPLEMENTATION
    settings: ClassVar[type] = Settings

    def __init__(self, savings: Mapping[str, float], slow: bool = False) -> None:
        self.savings = savings
        self.slow_start = slow  # type: ignore[misc]

    def suggest(self, context, current):
        return [] if current else [Suggestion({"on": True}, self.savings)]


def use_techniques(monkeypatch, techniques: Mapping[str, Technique]) -> None:
    """Let these be all the techniques that there are."""
    all_names = registry.names

    def names(package: str, constant: str) -> list[str]:
        return list(techniques) if constant == "TECHNIQUE" else all_names(package, constant)

    monkeypatch.setattr(registry, "names", names)
    for module in ("steplab.tune.proposals", "steplab.tune.rung", "steplab.techniques.recipes"):
        monkeypatch.setattr(f"{module}.technique", lambda name: techniques[name])


def simulated_run(spec: RunSpec, ms: float) -> Run:
    """Return a profiled Run: half of it matrix products, a third waiting for launches."""
    run = run_of((ms,) * 8, recipe=spec.recipe.techniques)
    terms = {"kernels": ms * 2 / 3, "launch": ms / 3}
    categories = (Category("matmul fp32 simt", ms / 2, 10), Category("elementwise", ms / 6, 10))
    budget = Budget((StepBudget(0, ms, terms, categories),), on_device=False)
    memory = Memory(0, int(ms * 2**20), None, None, "process resident set")
    return replace(
        run, spec=spec, id=f"run-{spec.recipe.label}", memory=memory,
        profile=Profile((0, 1, 1, 1), ("trace.json",), budget=budget),
    )  # fmt: skip


def candidates_of(world: World):
    """Return the class that stands in for RemoteCandidate."""

    class Candidate:
        def __init__(self, spec, environment, pool):
            self.spec = spec
            self.names = frozenset(spec.recipe.techniques)
            self.turns = 0
            world.alive += 1

        def open(self, shapes, references, timeout, progress):
            world.opened.append(self.spec.recipe.label)
            world.timeouts[self.spec.recipe.label] = timeout
            run = replace(simulated_run(self.spec, world.ms(self.names)), profile=None)
            world.now += world.open_seconds
            broken = self.names & set(world.broken)
            if broken:
                world.now += timeout if world.broken[min(broken)] == "timeout" else 0.0
                status = world.broken[min(broken)]
                return CandidateResult(replace(run, status=status, reason="it broke", clock=None))
            if self.names & world.red:
                return CandidateResult(
                    replace(run, clock=None), (Check("gradients", False, "wrong"),)
                )
            return CandidateResult(run, (Check("gradients", True, "right"),))

        def measure(self, steps, timeout):
            if self.names & world.lost_in_turns:
                raise MeasurementError("A worker was lost: gone.")
            self.turns += 1
            ms = world.ms(self.names) * world.mood()
            world.now += steps * ms / 1e3
            return Samples(tuple(ms * (1 + 0.001 * (i + self.turns % 2)) for i in range(3)), "ms")

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            self.close()

        def close(self):
            world.alive -= 1

    return Candidate


class NoProcesses(WorkerPool):
    """Starts no process."""

    def fill(self) -> None:
        pass


class FakeReferences(ReferenceWorker):
    def __init__(self, world: World) -> None:
        self.world = world
        self.folder = Path()

    def reference(self, shape, dtype, timeout):
        return ""

    def why_undecided(self, shape, dtype, timeout):
        return ""

    def has_dropout(self, spec, timeout):
        return False

    def check_curves(self, spec, timeout):
        return (Check("losses", not set(spec.recipe.techniques) & self.world.diverging, "", 9.0),)

    def dry_run(self, spec, shape, timeout):
        refused = set(spec.recipe.techniques) & self.world.refused
        return ("", Unsupported("needs something else", "Use that.")) if refused else ("fp32", None)


def use_world(monkeypatch, world: World, saved: list[str]) -> FakeReferences:
    """Let a search live in `world`; ids of stored champions go into `saved`."""
    candidate = candidates_of(world)
    for module in ("champion", "rung", "climb", "undecided"):
        monkeypatch.setattr(f"steplab.tune.{module}.RemoteCandidate", candidate)

    def promote(candidate, result, store, timeout, progress, detail):
        run = simulated_run(candidate.spec, world.ms(candidate.names))
        saved.append(run.spec.recipe.label)
        world.details.append(detail)
        return Champion(candidate, run, (), {})

    for module in ("champion", "climb"):
        monkeypatch.setattr(f"steplab.tune.{module}.promote", promote)
    monkeypatch.setattr("steplab.store.Store.save", lambda self, run, files=None: Path())
    return FakeReferences(world)


def use_clock(monkeypatch, world: World) -> None:
    """Let time pass only where candidates are opened and measured; the search begins at 0."""
    for module in ("tune.progress", "tune.rung", "workers.alternate"):
        monkeypatch.setattr(f"steplab.{module}.monotonic", lambda: world.now)


__all__ = ["ENVIRONMENT", "World"]
