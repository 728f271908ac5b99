"""A step that is kept alive, to be measured in turns with another one."""

from __future__ import annotations

from collections.abc import Callable

from steplab.engine.assemble import assemble, micro_batches
from steplab.engine.loop import measure, settle, warm_up
from steplab.probes.clock import ClockProbe
from steplab.probes.environment import capture
from steplab.probes.probe import Subject
from steplab.record import Samples
from steplab.spec import RunSpec


class LiveStep:
    """Assembled, compiled and warmed up on construction."""

    def __init__(self, spec: RunSpec, progress: Callable[[str], None]) -> None:
        step = assemble(spec)
        self.subject = Subject(step, micro_batches(step, spec), spec, capture())
        settle(self.subject, step.parts.settle_steps, progress)
        warm_up(self.subject, spec.warmup, progress)

    def measure(self, steps: int) -> Samples:
        """Time `steps` further steps; milliseconds each.

        One untimed step goes first: the other worker has had the device in between, and this
        one's first step finds its clocks and caches as that left them.
        """
        warm_up(self.subject, 1, lambda text: None)
        clock = ClockProbe()
        measure(self.subject, steps, clock, [], lambda text: None)
        return clock.result().step
