"""WorkerPool: workers started ahead of time; importing torch and opening a GPU takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Self

from steplab.core import Environment
from steplab.core.errors import SteplabError
from steplab.workers.client import AnyWorker, Progress, Worker, WorkerLost, no_progress

PRELOAD = "steplab.verify.candidate:preload"  # what a worker does while nobody needs it
START_SECONDS = 120.0  # on a slow machine with cold disks, for all that start together
# An idle CUDA context takes about 0.5 GiB: one in 20 GB is less than 3 % of a card's memory. With
# four, one candidate in four waits for new ones; more would gain little.
MEMORY_PER_WORKER = 20e9  # bytes
MAX_WORKERS = 4
CORES_PER_WORKER = 4  # they start while references are computed or a candidate is verified


def pool_size(environment: Environment, ranks: int = 1) -> int:
    """Return how many workers, of so many ranks, may be kept ahead; 1 to 4.

    Candidates run on the first GPU, and their ranks may share it.
    """
    memory = environment.accelerators[0].memory_bytes if environment.accelerators else 0
    fits = min(int(memory / MEMORY_PER_WORKER), environment.cores // CORES_PER_WORKER)
    return max(1, min(fits // ranks, MAX_WORKERS))


class WorkerPool:
    """Workers, or groups of ranks, that are started ahead: one, unless `size` is set to more.

    The pool is filled all at once, when it is empty: nothing is timed while workers start, so
    starting them together costs one wait. One that does not come up, or dies, is replaced when it
    is needed.
    """

    def __init__(self) -> None:
        self.size = 1
        self.start: Callable[[], AnyWorker] = Worker
        self.workers: list[AnyWorker] = []  # oldest first
        self.starting: list[AnyWorker] = []  # those of them that have not answered yet

    def refill(self) -> None:
        """Fill the pool if it is empty, and do not wait for it."""
        if not self.workers:
            self.fill()

    def fill(self) -> None:
        """Start as many workers as are missing, and do not wait for them."""
        for _ in range(self.size - len(self.workers)):
            worker = self.start()
            self.workers.append(worker)
            self.starting.append(worker)
            try:
                worker.send(PRELOAD)
            except WorkerLost:
                self._drop(worker)

    def wait(self, progress: Progress = no_progress) -> None:
        """Wait until all that are starting have started: nothing may disturb a measurement."""
        if self.starting:
            progress("waiting for the next processes to start")
        deadline = monotonic() + START_SECONDS
        for worker in list(self.starting):
            try:
                # Even after the deadline, one that has answered already is heard.
                worker.receive(type(None), timeout=max(deadline - monotonic(), 0.1))
                self.starting.remove(worker)
            except (WorkerLost, SteplabError):
                self._drop(worker)

    def take(self) -> AnyWorker:
        """Return a worker that is ready, once none is starting any more; without one, a new one."""
        self.wait()
        while self.workers:
            worker = self.workers.pop(0)
            if worker.is_alive:
                return worker
            worker.close()
        return self.start()

    def close(self) -> None:
        """End the workers that nobody took."""
        for worker in list(self.workers):
            self._drop(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _drop(self, worker: AnyWorker) -> None:
        worker.close()
        self.workers.remove(worker)
        if worker in self.starting:
            self.starting.remove(worker)
