"""Workers kept ahead: how many, when they start, and what becomes of those that die."""

from typing import ClassVar

import pytest

from steplab.core import Accelerator, Environment
from steplab.core.errors import MeasurementError
from steplab.workers import pool as module
from steplab.workers.client import WorkerLost
from steplab.workers.pool import PRELOAD, WorkerPool, pool_size


class FakeWorker:
    """Answers when it is waited for; `lost` and `broken` raise instead."""

    fates: ClassVar[list[str]] = []  # of those to come; then all live

    def __init__(self):
        self.fate = self.fates.pop(0) if self.fates else "live"
        self.asked, self.waited, self.closed, self.is_alive = [], 0, 0, True
        self.all.append(self)

    def send(self, function):
        if self.fate == "unheard":
            raise WorkerLost("crashed", "gone")
        self.asked.append(function)

    def receive(self, returns, *, timeout):
        self.waited += 1
        if self.fate == "interrupted":
            raise KeyboardInterrupt
        if self.fate == "lost":
            raise WorkerLost("timeout", "no answer")
        if self.fate == "broken":
            raise MeasurementError("CUDA out of memory.")

    def close(self):
        self.closed += 1


@pytest.fixture
def workers(monkeypatch):
    """Every worker that was started, in order."""
    monkeypatch.setattr(FakeWorker, "all", [], raising=False)
    monkeypatch.setattr(FakeWorker, "fates", [])
    monkeypatch.setattr(module, "Worker", FakeWorker)
    return FakeWorker.all


def pool(size):
    spares = WorkerPool()
    spares.size = size
    return spares


def machine(memory_gb, cores):
    cards = (Accelerator("card", int(memory_gb * 1e9)),) if memory_gb else ()
    return Environment("0", "3.11", "Linux", "cpu", cores, None, accelerators=cards)


@pytest.mark.parametrize(
    ("memory_gb", "cores", "count"),
    [
        (150, 16, 4),  # an H200
        (85, 64, 4),
        (42, 64, 2),
        (25, 64, 1),
        (8, 64, 1),
        (150, 8, 2),
        (150, 2, 1),
        (None, 64, 1),
    ],
)
def test_memory_and_cores_decide_how_many(memory_gb, cores, count):
    assert pool_size(machine(memory_gb, cores)) == count


@pytest.mark.parametrize(("ranks", "count"), [(1, 4), (2, 3), (4, 1), (16, 1)])
def test_a_group_counts_as_its_ranks(ranks, count):
    assert pool_size(machine(150, 64), ranks) == count


def test_one_is_kept_unless_there_is_room(workers):
    spares = WorkerPool()
    spares.refill()
    spares.refill()
    assert len(workers) == 1 and workers[0].asked == [PRELOAD] and not workers[0].waited
    assert spares.take() is workers[0] and workers[0].waited == 1
    spares.refill()
    assert len(workers) == 2


def test_the_first_is_joined_by_the_others_once_the_room_is_known(workers):
    spares = WorkerPool()
    spares.refill()
    spares.size = 4
    spares.fill()
    assert len(workers) == 4 and not any(worker.waited for worker in workers)


def test_a_pool_is_filled_again_only_when_it_is_empty(workers):
    spares = pool(3)
    spares.refill()
    taken = []
    for _ in range(3):
        assert len(workers) == 3
        taken.append(spares.take())
        if spares.workers:
            spares.refill()
    assert taken == workers
    spares.refill()
    assert len(workers) == 6 and len(spares.starting) == 3


def test_a_clock_waits_for_all_that_start_and_once(workers):
    spares, stages = pool(3), []
    spares.wait(stages.append)
    assert stages == []
    spares.fill()
    spares.wait(stages.append)
    spares.wait(stages.append)
    assert stages == ["waiting for the next processes to start"]
    assert [worker.waited for worker in workers] == [1, 1, 1] and not spares.starting


def test_none_is_handed_over_while_others_start(workers):
    """Whoever takes one measures next."""
    spares = pool(3)
    spares.fill()
    assert spares.take() is workers[0] and not spares.starting


@pytest.mark.parametrize("fate", ["lost", "broken", "unheard"])
def test_one_that_does_not_come_up_is_ended_and_the_next_is_taken(workers, fate):
    FakeWorker.fates[:] = [fate]
    spares = pool(2)
    spares.fill()
    assert spares.take() is workers[1] and workers[0].closed == 1 and not workers[1].closed
    assert not spares.workers and not spares.starting


def test_one_that_died_while_it_waited_is_not_handed_over(workers):
    spares = pool(2)
    spares.fill()
    spares.wait()
    workers[0].is_alive = False
    assert spares.take() is workers[1] and workers[0].closed == 1


def test_where_all_died_a_new_one_is_started(workers):
    FakeWorker.fates[:] = ["lost", "lost"]
    spares = pool(2)
    spares.fill()
    assert spares.take() is workers[2] and not workers[2].asked
    spares.refill()
    assert len(workers) == 5


def test_closing_ends_those_that_nobody_took_also_after_an_interruption(workers):
    FakeWorker.fates[:] = ["live", "live", "interrupted", "live"]
    spares = pool(4)
    spares.fill()
    with pytest.raises(KeyboardInterrupt):
        spares.wait()
    spares.close()
    assert [worker.closed for worker in workers] == [1, 1, 1, 1]
    assert not spares.workers and not spares.starting
    spares.close()


@pytest.mark.slow
@pytest.mark.usefixtures("started_workers")
def test_real_processes_start_together_and_all_end(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spares = pool(2)
    spares.fill()
    started = list(spares.workers)
    try:
        spares.wait()
        assert len(spares.workers) == 2 and all(worker.is_alive for worker in started)
        started[0].process.kill()
        started[0].process.wait()
        assert spares.take() is started[1]
    finally:
        started[1].close()
        spares.close()
    assert not any(worker.is_alive for worker in started)
