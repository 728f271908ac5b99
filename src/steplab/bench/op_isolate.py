"""Cells in a worker process: an illegal access or a hang costs one row. No torch on this side."""

from __future__ import annotations

from dataclasses import replace

from steplab.core import Environment, Run, RunSpec, new_run_id
from steplab.core.codec import decode, encode
from steplab.core.errors import MeasurementError
from steplab.core.run import now
from steplab.workers.client import Progress, TrialRunner, Worker, WorkerLost, no_progress

# A process goes on after these: nothing was run, or all of it ended well.
HARMLESS = ("ok", "unsupported")


class CellWorker(Worker):
    """The engine's worker with another program inside."""

    program = "steplab.bench.op_worker"


class CellIsolation(TrialRunner):
    """Keeps one worker for all cells until a cell fails: starting one costs seconds on a GPU."""

    def trial(
        self,
        spec: RunSpec,
        environment: Environment,
        key: str = "",
        progress: Progress = no_progress,
    ) -> Run:
        """Measure one cell; a worker that is lost becomes the Run's status."""
        run = Run(new_run_id(spec), spec, environment, created=now())
        try:
            request = {"do": "trial", "spec": encode(spec)}
            answer = self._worker(key).ask(request, self.timeout, progress)
            run = decode(Run, answer, "run")
        except WorkerLost as lost:
            run = replace(run, status=lost.status, reason=lost.reason)
        except MeasurementError as error:
            run = replace(run, status="failed", reason=str(error))
        if run.status not in HARMLESS:
            self._drop()
        return run

    def _worker(self, key: str) -> Worker:
        if self.worker is None:
            self.worker = CellWorker()
        return self.worker
