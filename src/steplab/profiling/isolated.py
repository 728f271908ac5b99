"""Profiling in a worker process: a crash or a time-out becomes the Run's status. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

from steplab.core import Environment, Run, RunSpec, new_run_id
from steplab.core.codec import decode, encode
from steplab.core.errors import MeasurementError
from steplab.core.run import now
from steplab.profiling.plan import ProfilePlan
from steplab.workers.client import Progress, Worker, WorkerLost, no_progress


class ProfilingWorker(Worker):
    """A Worker that is asked for profiles."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        super().__init__()

    def __enter__(self) -> Self:
        return self

    def environment(self) -> Environment:
        """Ask what this machine is."""
        try:
            answer = self.ask({"do": "environment"}, self.timeout)
        except WorkerLost as lost:
            raise MeasurementError(f"The worker process does not start: {lost.reason}.") from None
        found: Environment = decode(Environment, answer, "environment")
        return found

    def profile(
        self,
        spec: RunSpec,
        plan: ProfilePlan,
        folder: Path,
        environment: Environment,
        progress: Progress = no_progress,
    ) -> Run:
        """Measure and record one spec, the traces into `folder`; a lost worker is a status."""
        request = {"do": "profile", "spec": encode(spec), "plan": encode(plan)}
        request["folder"] = str(folder.resolve())
        try:
            run: Run = decode(Run, self.ask(request, self.timeout, progress), "run")
        except WorkerLost as lost:
            blank = Run(new_run_id(spec), spec, environment, created=now())
            run = replace(blank, status=lost.status, reason=lost.reason)
        return run
