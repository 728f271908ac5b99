"""When a search starts processes: never while a clock runs, and few at a time."""

from dataclasses import replace

import pytest

from steplab.core import RunSpec
from steplab.techniques.recipes import parse_recipe
from steplab.tune import rung
from steplab.tune.options import TuneOptions
from steplab.tune.progress import NullView
from steplab.tune.search import tune
from steplab.workers.pool import PRELOAD, WorkerPool
from tests.tune.ladders import ENVIRONMENT, FakeTechnique, World, use_techniques, use_world
from tests.tune.simulated_gpu import H200, SEED, Clock, candidates_on, use_gpu
from tests.tune.test_flagship_path import SlowReferences


class Machine:
    """Counts processes; a clock may run only where none is starting."""

    def __init__(self, monkeypatch):
        self.started, self.closed, self.opened = 0, 0, 0
        machine = self

        class Process:
            def __init__(self):
                machine.started += 1
                self.is_alive = True

            def send(self, function):
                assert function == PRELOAD

            def receive(self, returns, *, timeout):
                pass

            def close(self):
                machine.closed += self.is_alive
                self.is_alive = False

        monkeypatch.setattr("steplab.workers.pool.Worker", Process)

    def use(self, monkeypatch, candidate_class, pool):
        """Let candidates take their processes from `pool`."""
        machine = self

        class Candidate(candidate_class):
            def __init__(self, spec, environment, given):
                super().__init__(spec, environment, given)
                self.worker = given.take()

            def open(self, *asked):
                # The baseline's profile decides on all that follows.
                assert machine.opened or not pool.starting
                machine.opened += 1
                return super().open(*asked)

            def measure(self, steps, timeout):
                assert not pool.starting, "a process starts while a clock runs"
                return super().measure(steps, timeout)

            def close(self):
                super().close()
                self.worker.close()

        for module in ("champion", "rung", "climb"):
            monkeypatch.setattr(f"steplab.tune.{module}.RemoteCandidate", Candidate)


class Watching(NullView):
    """Counts how often processes are waited for."""

    def __init__(self):
        self.waits = 0

    def stage(self, text):
        self.waits += "waiting for the next processes" in text


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def on_gpu(monkeypatch, store, machine, environment):
    """Climb; return the ladder, its view, and how many pool were left."""
    clock, pool, view = Clock(), WorkerPool(), Watching()
    use_gpu(monkeypatch, clock, lambda recipe: False)
    machine.use(monkeypatch, candidates_on(clock, lambda recipe: False), pool)
    pool.refill()
    spec = RunSpec("tsmoe", {}, "flagship", batch=16, device="cuda", recipe=parse_recipe(SEED))
    options = TuneOptions(begun=clock.now)
    ladder = tune(spec, options, store, SlowReferences(clock), environment, view, pool)[0]
    idle = len(pool.workers)
    pool.close()
    return ladder, view, idle


def test_on_a_large_gpu_one_rung_in_four_waits_for_processes(monkeypatch, store, machine):
    environment = replace(H200, cores=16)
    ladder, view, idle = on_gpu(monkeypatch, store, machine, environment)
    rungs = len(ladder.rungs)
    assert rungs >= 8 and 0 < view.waits <= (rungs + 1) // 4
    assert "waiting" in {part for rung in ladder.rungs for part in rung.parts}
    assert machine.started == 1 + rungs + idle and idle <= 4
    assert machine.closed == machine.started


def test_on_two_cores_a_gpu_has_one_spare_as_ever(monkeypatch, store, machine):
    environment = replace(H200, cores=2)
    ladder, _, idle = on_gpu(monkeypatch, store, machine, environment)
    assert idle == 1 and machine.closed == machine.started == len(ladder.rungs) + 2


def test_on_a_cpu_one_process_starts_for_each_rung(monkeypatch, store, machine):
    world, pool, view = World({"quick": 0.7, "idle": 1.0}), WorkerPool(), Watching()
    techniques = {
        "quick": FakeTechnique({"kind:matmul": 1.0}),
        "idle": FakeTechnique({"term:launch": 1.0}),
    }
    use_techniques(monkeypatch, techniques)
    references = use_world(monkeypatch, world, [])
    machine.use(monkeypatch, rung.RemoteCandidate, pool)
    pool.refill()
    spec = RunSpec("gpt", {"context": 128, "width": 64}, "tiny")
    ladder = tune(spec, TuneOptions(), store, references, ENVIRONMENT, view, pool)[0]
    assert pool.size == 1 and not pool.workers and view.waits == 0
    assert machine.started == machine.closed == 1 + len(ladder.rungs)
