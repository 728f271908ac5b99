"""LiveStep: a step that a worker keeps alive, to be measured in turns with another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch._dynamo

from steplab.core import RunSpec, Samples
from steplab.core.errors import MeasurementError
from steplab.core.run import new_run
from steplab.probes.compilation import CompilationProbe
from steplab.probes.environment import capture_environment
from steplab.probes.probe import Subject
from steplab.probes.ran import RanProbe
from steplab.step.assemble import assemble, micro_batches
from steplab.step.loop import settle, settle_scaler, time_steps, warm_up
from steplab.step.trial import find_mismatch


class LiveStep:
    """Assembled, compiled and warmed up on construction."""

    def __init__(self, spec: RunSpec, progress: Callable[[str], None]) -> None:
        torch._dynamo.reset()  # before the model is made, which may compile something by itself
        step = assemble(spec)
        feed = micro_batches(step, spec, step.parts.loader_workers)
        self.subject = Subject(step, feed, spec, capture_environment())
        self.compilation = CompilationProbe()
        self.compilation.begin(self.subject)
        settle(self.subject, step.parts.settle_steps, progress)
        settle_scaler(self.subject)
        warm_up(self.subject, spec.warmup, progress)
        self.compilation.open_window(self.subject)

    def measure(self, steps: int) -> Samples:
        """Time further steps; milliseconds each."""
        return time_steps(self.subject, steps)

    def check(self) -> None:
        """Look at one profiled step and raise when it is not what was asked for."""
        ran, spec = RanProbe(), self.subject.spec
        self.compilation.close_window(self.subject)
        ran.inspect(self.subject)
        run = new_run(spec, self.subject.environment)
        mismatch = find_mismatch(
            replace(run, ran=ran.result(), compilation=self.compilation.result())
        )
        if mismatch:
            raise MeasurementError(f"{spec.recipe.label}: {mismatch}.")
