"""Trials in worker processes: out of memory, a crash or a time-out becomes a row with a status."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, Self

from steplab.core import Environment, Run, RunSpec, Status
from steplab.core.errors import MeasurementError, SteplabError
from steplab.core.printable import printable
from steplab.core.run import new_run
from steplab.workers.client import AnyWorker, Progress, Worker, WorkerLost, no_progress
from steplab.workers.ranks import start_worker

TRIAL = "steplab.step.trial:trial"


class TrialRunner:
    """Measures specs one after another, each by a call of `function` in a worker.

    Trials with the same `key` and the same number of ranks share a worker (a group of them), which
    saves its start (2 s on a CPU, more with CUDA); another key gets a fresh one, and so does the
    trial after one whose status is not in `keep_after`: what such a trial leaves behind may spoil
    the next.
    """

    def __init__(
        self,
        timeout: float = 600.0,
        function: str = TRIAL,
        keep_after: tuple[Status, ...] = ("ok",),
        worker: AnyWorker | None = None,
    ) -> None:
        self.timeout = timeout
        self.function = function
        self.keep_after = keep_after
        self.worker = worker  # one that has started already
        self.key = ""

    def environment(self) -> Environment:
        """Return what this machine is."""
        try:
            if self.worker is None:
                self.worker = Worker()
            return self.worker.environment(self.timeout)
        except SteplabError:
            self.close()
            raise

    def trial(
        self,
        spec: RunSpec,
        environment: Environment,
        key: str = "",
        progress: Progress = no_progress,
        function: str = "",
        **arguments: Any,
    ) -> Run:
        """Measure one spec; a worker that is lost becomes the Run's status.

        `function` is called instead of the usual one; `arguments` are what it takes beside the
        spec. UserErrors propagate.
        """
        options = {"timeout": self.timeout, "progress": progress, **arguments}
        try:
            worker = self._worker_for(key, spec)
            run = worker.call(function or self.function, Run, spec=spec, **options)
        except WorkerLost as lost:
            run = replace(new_run(spec, environment), status=lost.status, reason=lost.reason)
        except MeasurementError as error:
            run = replace(new_run(spec, environment), status="failed", reason=str(error))
        except SteplabError:
            self._show_printed()
            self.close()
            raise
        if run.status in ("failed", "crashed", "timeout"):
            self._show_printed()
        if run.status not in self.keep_after:
            self.close()
        return run

    def _show_printed(self) -> None:
        """Show what the model printed: it may say more about a failure than its error."""
        lines = self.worker.printed() if self.worker is not None else []
        if lines:
            shown = "\n".join(f"  {printable(line)}" for line in lines)
            print(f"what the model's process printed last:\n{shown}", file=sys.stderr)

    def close(self) -> None:
        """End the worker; the next trial starts another."""
        if self.worker is not None:
            self.worker.close()
        self.worker, self.key = None, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _worker_for(self, key: str, spec: RunSpec) -> AnyWorker:
        # A worker without a key has run nothing yet, or may run anything: any key may have it.
        fits = self.key in ("", key)
        if self.worker is None or self.worker.ranks != spec.ranks or not fits:
            self.close()
            self.worker = start_worker(spec)
        self.key = key
        return self.worker
