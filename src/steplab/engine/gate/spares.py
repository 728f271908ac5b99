"""A worker started before it is needed: importing torch and opening a GPU takes seconds."""

from __future__ import annotations

from steplab.engine.isolate import Worker, WorkerLost
from steplab.errors import SteplabError

START_SECONDS = 120.0  # on a slow machine with cold disks


class Spares:
    """Keeps at most one worker ahead; one that does not come up is replaced when it is needed."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.is_ready = False

    def prepare(self) -> None:
        """Start one, if there is none, and do not wait for it."""
        if self.worker is None:
            self.worker, self.is_ready = Worker(), False
            self._ask()

    def settle(self) -> None:
        """Wait until the one that is starting has started: nothing must disturb a clock."""
        if self.worker is None or self.is_ready:
            return
        try:
            self.worker.receive(START_SECONDS)
            self.is_ready = True
        except (WorkerLost, SteplabError):
            self.close()

    def take(self) -> Worker:
        """Hand it over, ready; without one, a new one."""
        self.settle()
        worker, self.worker = self.worker, None
        return worker or Worker()

    def close(self) -> None:
        """End the one that nobody took."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _ask(self) -> None:
        assert self.worker is not None
        try:
            self.worker.send({"do": "warm"})
        except WorkerLost:
            self.close()
