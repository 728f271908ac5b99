"""Workers started before they are needed: importing torch and opening a GPU takes seconds."""

from __future__ import annotations

from time import monotonic

from steplab.core import Environment
from steplab.core.errors import SteplabError
from steplab.workers.client import Progress, Worker, WorkerLost, no_progress

START_SECONDS = 120.0  # on a slow machine with cold disks, for all that start together
# An idle CUDA context takes about 0.5 GiB: one in 20 GB is less than 3 % of a card's memory. With
# four, one candidate in four waits for new ones; more would gain little.
MEMORY_PER_WORKER = 20e9  # bytes
MAX_WORKERS = 4
CORES_PER_WORKER = 4  # they start beside the scout, or beside a candidate at the gate


def pool_size(environment: Environment) -> int:
    """Return how many spares may be kept ahead where candidates run on the first GPU; 1 to 4."""
    memory = environment.accelerators[0].memory_bytes if environment.accelerators else 0
    fits = min(int(memory / MEMORY_PER_WORKER), environment.cores // CORES_PER_WORKER)
    return max(1, min(fits, MAX_WORKERS))


class WorkerPool:
    """A pool of workers, of one unless there is room for more.

    It is filled all at once, when it is empty: whoever needs a clock has to wait until all that are
    starting have started. One that does not come up, or dies, is replaced when it is needed.
    """

    def __init__(self) -> None:
        self.size = 1
        self.workers: list[Worker] = []  # oldest first
        self.starting: list[Worker] = []  # those of them that have not answered yet

    def prepare(self) -> None:
        """Fill an empty pool, and do not wait for it."""
        if not self.workers:
            self.fill()

    def fill(self) -> None:
        """Start as many as are missing, and do not wait for them."""
        for _ in range(self.size - len(self.workers)):
            worker = Worker()
            self.workers.append(worker)
            self.starting.append(worker)
            try:
                worker.send({"do": "warm"})
            except WorkerLost:
                self._drop(worker)

    def settle(self, progress: Progress = no_progress) -> None:
        """Wait until all that are starting have started: nothing must disturb a clock."""
        if self.starting:
            progress("waiting for the next processes to start")
        deadline = monotonic() + START_SECONDS
        for worker in list(self.starting):
            try:
                # Even after the deadline one that has answered already is heard.
                worker.receive(max(deadline - monotonic(), 0.1))
                self.starting.remove(worker)
            except (WorkerLost, SteplabError):
                self._drop(worker)

    def take(self) -> Worker:
        """Hand one over, ready, when none is starting any more; without one, a new one."""
        self.settle()
        while self.workers:
            worker = self.workers.pop(0)
            if worker.is_alive:
                return worker
            worker.close()
        return Worker()

    def close(self) -> None:
        """End those that nobody took."""
        for worker in list(self.workers):
            self._drop(worker)

    def _drop(self, worker: Worker) -> None:
        worker.close()
        self.workers.remove(worker)
        if worker in self.starting:
            self.starting.remove(worker)
