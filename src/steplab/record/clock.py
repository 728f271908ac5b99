"""Clock: where the time of the measured steps went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from steplab.record.samples import Samples


@dataclass(frozen=True)
class Clock:
    """Times in milliseconds, one value per measured step.

    `step` is the period from the end of one step to the end of the next, with no
    synchronisation in between: what a training loop sees. `host` is the time the Python thread
    needed to issue the step; where `host` is as long as `step`, the host is the limit.
    `phases` are device times between the marks of forward, backward, clip and optimizer.
    """

    step: Samples
    host: Samples
    data_wait: Samples
    phases: Mapping[str, Samples]
    host_phases: Mapping[str, Samples]
    window_ms: float  # wall time of the whole window, synchronised at both ends
    source: str  # "cuda events" or "perf_counter"
    # Time in which threads waited for a core, over that of the window, summed over threads.
    contended: float | None = field(default=None, kw_only=True)

    @property
    def agreement(self) -> float:
        """Sum of the step samples over the wall time of the window; 1 when both clocks agree."""
        return sum(self.step.values) / self.window_ms if self.window_ms else float("nan")
