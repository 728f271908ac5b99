"""RankGroup: several workers that share one step, called like one worker.

Every rank makes the same call. The answer is that of all ranks together: the merged Run, the
slowest samples, else what rank 0 says. A rank that dies or fails ends the group soon after, since
the others would wait for it until their time is up.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from time import monotonic
from typing import Any, Self, TypeVar

from steplab.core import Environment, Run, RunSpec, Samples
from steplab.core.errors import SteplabError
from steplab.core.ranks import merge_ranks, slowest
from steplab.workers.client import AnyWorker, Progress, Worker, WorkerLost, no_progress

JOIN = "steplab.parallel.world:join_local"
JOIN_SECONDS = 120.0  # on a slow machine with cold disks, for all that start together
# What the others may still take after one rank has failed. They see the failure at their next
# collective, unless they wait for a rank that is alive and will never call it.
GRACE_SECONDS = 10.0
T = TypeVar("T")

# How the answers of all ranks become one; by default rank 0 speaks for all.
MERGES: Mapping[type, Callable[[Sequence[Any]], Any]] = {Run: merge_ranks, Samples: slowest}


def start_worker(spec: RunSpec) -> AnyWorker:
    """Start what a spec is measured in: one process, or one for each of its ranks."""
    return Worker() if spec.ranks == 1 else RankGroup(spec.ranks, spec.device, spec.backend)


class RankGroup:
    """`size` workers on this machine that have joined one group; has a Worker's interface."""

    def __init__(self, size: int, device: str, backend: str = "") -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="steplab-ranks-")
        self.workers = [Worker() for _ in range(size)]
        meeting = (Path(self.folder.name).resolve() / "store").as_uri()
        shared = {"size": size, "rendezvous": meeting, "device": device, "backend": backend}
        shared["threads"] = max(1, (os.cpu_count() or 1) // size)
        self.joining = True  # whether the answers to this call are still to be read
        for rank, worker in enumerate(self.workers):
            worker.send(JOIN, rank=rank, **shared)

    def call(
        self,
        function: str,
        returns: type[T],
        *,
        timeout: float,
        progress: Progress = no_progress,
        **arguments: Any,
    ) -> T:
        """Call a function in every rank and return the merged result."""
        self.send(function, **arguments)
        return self.receive(returns, timeout=timeout, progress=progress)

    def keep(self, function: str, *, timeout: float, **arguments: Any) -> None:
        """Call a function or class in every rank and keep what it returns alive there."""
        self._join()
        for rank, worker in enumerate(self.workers):
            with _naming(rank):
                worker.send_keep(function, **arguments)
        self._answers(type(None), timeout, no_progress)

    def send(self, function: str, **arguments: Any) -> None:
        """Ask every rank for a call without waiting; a list `PerRank` gives each its own value."""
        self._join()
        for rank, worker in enumerate(self.workers):
            own = {k: v[rank] if isinstance(v, PerRank) else v for k, v in arguments.items()}
            with _naming(rank):
                worker.send(function, **own)

    def receive(self, returns: type[T], *, timeout: float, progress: Progress = no_progress) -> T:
        """Wait for the result of the last call, `timeout` seconds at most."""
        answers = self._answers(returns, timeout, progress)
        merged: T = MERGES.get(returns, lambda found: found[0])(answers)
        return merged

    def environment(self, timeout: float) -> Environment:
        """Return what this machine is."""
        self._join()
        return self.workers[0].environment(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether no rank has ended."""
        return all(worker.is_alive for worker in self.workers)

    def close(self) -> None:
        """End all ranks."""
        for worker in self.workers:
            worker.close()
        self.folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _join(self) -> None:
        if self.joining:
            self.joining = False
            self._answers(type(None), JOIN_SECONDS, no_progress)

    def _answers(self, returns: type[T], timeout: float, progress: Progress) -> list[T]:
        """Return every rank's answer, or raise the first failure with its rank."""
        answers: dict[int, T] = {}
        failure: tuple[int, Exception] | None = None
        deadline = monotonic() + timeout
        with ThreadPoolExecutor(len(self.workers)) as threads:
            waiting: dict[Future[T], int] = {}
            for rank, worker in enumerate(self.workers):
                tell = progress if rank == 0 else no_progress
                job = threads.submit(worker.receive, returns, timeout=timeout, progress=tell)
                waiting[job] = rank
            while waiting:
                done, _ = wait(waiting, deadline - monotonic(), FIRST_COMPLETED)
                if not done:  # the others will not come: ended, they answer at once
                    for worker in self.workers:
                        worker.end()
                    deadline = monotonic() + timeout
                for job in done:
                    rank = waiting.pop(job)
                    try:
                        answers[rank] = job.result()
                        failed = getattr(answers[rank], "status", "ok") != "ok"
                    except (SteplabError, WorkerLost) as error:
                        failed, failure = True, failure or (rank, error)
                    if failed:
                        deadline = min(deadline, monotonic() + GRACE_SECONDS)
        told = [answers[rank] for rank in sorted(answers)]
        if any(getattr(answer, "status", "ok") != "ok" for answer in told):
            return told  # a rank says what went wrong in a Run: the others only lost it
        if failure is not None:
            raise _with_rank(*failure)
        return told


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
