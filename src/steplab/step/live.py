"""A step that is kept alive, to be measured in turns with another one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo

from steplab.core import Run, RunSpec, Samples
from steplab.core.errors import MeasurementError
from steplab.probes.clock import ClockProbe
from steplab.probes.compilation import CompilationProbe
from steplab.probes.environment import capture_environment
from steplab.probes.probe import Subject
from steplab.probes.ran import RanProbe
from steplab.step.assemble import assemble, micro_batches
from steplab.step.loop import measure, settle, settle_scaler, warm_up
from steplab.techniques.recipes import technique


class LiveStep:
    """Assembled, compiled and warmed up on construction."""

    def __init__(self, spec: RunSpec, progress: Callable[[str], None]) -> None:
        torch._dynamo.reset()  # before the model is made, which may compile something by itself
        step = assemble(spec)
        self.subject = Subject(step, micro_batches(step, spec), spec, capture_environment())
        self.compilation = CompilationProbe()
        self.compilation.begin(self.subject)
        settle(self.subject, step.parts.settle_steps, progress)
        settle_scaler(self.subject)
        warm_up(self.subject, spec.warmup, progress)
        self.compilation.open_window(self.subject)

    def verify(self) -> None:
        """Look at one profiled step and raise when it is not what was asked for."""
        spec = self.subject.spec
        ran, compilation = RanProbe(), self.compilation
        compilation.close_window(self.subject)
        ran.inspect(self.subject)
        run = Run(
            "", spec, capture_environment(), ran=ran.result(), compilation=compilation.result()
        )
        for name, settings in spec.recipe.techniques.items():
            difference = technique(name).mismatch(settings, run)
            if difference:
                raise MeasurementError(f"{spec.recipe.label}: {difference}.")

    def measure(self, steps: int) -> Samples:
        """Time `steps` further steps; milliseconds each.

        One untimed step goes first: the other worker has had the device in between, and this
        one's first step finds its clocks and caches as that left them.
        """
        warm_up(self.subject, 1, lambda text: None)
        clock = ClockProbe()
        measure(self.subject, steps, clock, [], lambda text: None)
        return clock.result().step
