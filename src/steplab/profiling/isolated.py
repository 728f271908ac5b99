"""Profiling in a worker process: a crash or a time-out becomes the Run's status. No torch."""

from __future__ import annotations

from pathlib import Path

from steplab.core import Environment, Run, RunSpec
from steplab.profiling.plan import ProfilePlan
from steplab.workers.client import Progress, no_progress
from steplab.workers.trials import TrialRunner


class ProfilingWorker(TrialRunner):
    """Records profiles in a worker."""

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout, "steplab.profiling.recorder:profile_spec")

    def profile(
        self,
        spec: RunSpec,
        plan: ProfilePlan,
        folder: Path,
        environment: Environment,
        progress: Progress = no_progress,
    ) -> Run:
        """Measure and record one spec, the traces into `folder`."""
        return self.trial(spec, environment, progress=progress, plan=plan, folder=folder)
