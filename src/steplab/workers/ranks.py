"""RankGroup: several workers that share one step, called like one worker.

Every rank makes the same call. The answer is that of all ranks together: the merged Run, the
slowest samples, what a record makes of them by `of_ranks`, else what rank 0 says. A rank that dies
or fails ends the group soon after, since the others would wait for it until their time is up.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from steplab.core import Run, RunSpec, Samples
from steplab.core.errors import SteplabError
from steplab.core.ranks import merge_ranks, slowest
from steplab.workers.client import AnyWorker, Progress, Worker, WorkerLost, no_progress

JOIN = "steplab.parallel.world:join_local"
JOIN_SECONDS = 120.0  # on a slow machine with cold disks, for all that start together
# What the others may still take after one rank has failed. They see the failure at their next
# collective, unless they wait for a rank that is alive and will never call it.
GRACE_SECONDS = 10.0
LATE_SECONDS = 1.0  # by which a worker may say later than that that its time is up
T = TypeVar("T")

# How the answers of all ranks become one.
MERGES: Mapping[type, Callable[[Mapping[int, Any]], Any]] = {
    Run: merge_ranks,
    Samples: lambda found: slowest(list(found.values())),
}


def start_worker(spec: RunSpec) -> AnyWorker:
    """Start what a spec is measured in: one process, or one for each of its ranks."""
    return Worker() if spec.ranks == 1 else RankGroup(spec.ranks, spec.device, spec.backend)


class RankGroup(AnyWorker):
    """`size` workers on this machine that join one group."""

    def __init__(self, size: int, device: str, backend: str = "") -> None:
        self.ranks = size
        self.folder = tempfile.TemporaryDirectory(prefix="steplab-ranks-")
        self.workers: list[Worker] = []
        with self._ending_on_errors():
            for _ in range(size):
                self.workers.append(Worker())
        meeting = (Path(self.folder.name).resolve() / "store").as_uri()
        shared = {"size": size, "rendezvous": meeting, "device": device, "backend": backend}
        shared["threads"] = max(1, (os.cpu_count() or 1) // size)
        self.joining = True  # whether the answers to this call are still to be read
        for rank, worker in enumerate(self.workers):
            with contextlib.suppress(WorkerLost):  # who calls it learns that
                worker.send(JOIN, rank=rank, **shared)

    def send(self, function: str, **arguments: Any) -> None:
        """Ask every rank for a call without waiting; a list `PerRank` gives each its own value."""
        for rank, worker in enumerate(self.workers):
            own = {k: v[rank] if isinstance(v, PerRank) else v for k, v in arguments.items()}
            with _naming(rank):
                worker.send(function, **own)

    def send_keep(self, function: str, **arguments: Any) -> None:
        """Ask every rank for an object to be kept without waiting until it is made."""
        for rank, worker in enumerate(self.workers):
            with _naming(rank):
                worker.send_keep(function, **arguments)

    def receive(self, returns: type[T], *, timeout: float, progress: Progress = no_progress) -> T:
        """Wait for the result of the last call, `timeout` seconds at most."""
        if self.joining:
            self.joining = False
            self._answers(type(None), JOIN_SECONDS, no_progress)
        answers = self._answers(returns, timeout, progress)
        merge = MERGES.get(returns, getattr(returns, "of_ranks", _first))
        merged: T = merge(answers)
        return merged

    @property
    def is_alive(self) -> bool:
        """Whether no rank has ended."""
        return all(worker.is_alive for worker in self.workers)

    def printed(self) -> list[str]:
        """Return the last lines that a model printed since the last call, rank by rank."""
        ranks = enumerate(worker.printed() for worker in self.workers)
        return [f"rank {rank}: {line}" for rank, lines in ranks for line in lines]

    def end(self) -> None:
        """End the processes of all ranks; who waits for their answers learns that."""
        for worker in self.workers:
            worker.end()

    def close(self) -> None:
        """End all ranks."""
        self.end()
        for worker in self.workers:
            worker.close()
        self.folder.cleanup()

    def _answers(self, returns: type[T], timeout: float, progress: Progress) -> dict[int, T]:
        """Return the ranks' answers, or raise why there are none, with the rank that failed.

        Where a rank says in its answer what went wrong, the others may have none.
        """
        answers: dict[int, T] = {}
        failures: list[tuple[int, Exception]] = []  # the likeliest cause first
        died = told = ended = False
        gone: set[int] = set()  # ranks that had died before they were ended
        deadline = monotonic() + timeout + LATE_SECONDS
        with ThreadPoolExecutor(len(self.workers)) as threads, self._ending_on_errors():
            waiting: dict[Future[T], int] = {}
            for rank, worker in enumerate(self.workers):
                tell = progress if rank == 0 else no_progress
                job = threads.submit(worker.receive, returns, timeout=timeout, progress=tell)
                waiting[job] = rank
            while waiting:
                done, _ = wait(waiting, deadline - monotonic(), FIRST_COMPLETED)
                if not done:  # the others will not come: ended, they answer at once
                    gone = {rank for rank in waiting.values() if not self.workers[rank].is_alive}
                    self.end()
                    ended, deadline = True, monotonic() + timeout
                for job in done:
                    rank = waiting.pop(job)
                    try:
                        answers[rank] = job.result()
                        told |= getattr(answers[rank], "status", "ok") != "ok"
                    except SteplabError as error:
                        failures.append((rank, error))
                    except WorkerLost as lost:  # unless by us, the others failed because of it
                        by_us = ended and rank not in gone
                        died |= not by_us
                        failures.insert(len(failures) if by_us else 0, (rank, lost))
                    if told or failures:
                        deadline = min(deadline, monotonic() + GRACE_SECONDS)
        if died or (failures and not told):
            raise _with_rank(*failures[0])
        return answers

    @contextlib.contextmanager
    def _ending_on_errors(self) -> Iterator[None]:
        """End the ranks on Ctrl-C: threads that wait for their answers would not notice it."""
        try:
            yield
        except BaseException:
            self.end()
            raise


def _first(answers: Mapping[int, T]) -> T:
    """Rank 0 speaks for all."""
    return answers[0]


class PerRank(list[Any]):
    """An argument that differs from rank to rank."""


@contextlib.contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Add its rank to the loss of a worker."""
    try:
        yield
    except WorkerLost as lost:
        raise _with_rank(rank, lost) from None


def _with_rank(rank: int, error: Exception) -> Exception:
    """Return the error with the rank that it happened on."""
    if isinstance(error, WorkerLost):
        return WorkerLost(error.status, f"rank {rank}: {error.reason}")
    assert isinstance(error, SteplabError)
    return type(error)(f"rank {rank}: {error.message}", error.suggestion)
