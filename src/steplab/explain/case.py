"""Case: what the rules look at. A Run, a trace, or both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from steplab.explain.rows import Rows
from steplab.hardware.catalog import Card, find_card
from steplab.record import Run
from steplab.record.memory_timeline import MemoryTimeline
from steplab.trace.analysis import Analysis


@dataclass(frozen=True)
class Case:
    """Every part may be missing; a rule that needs it then says nothing."""

    run: Run | None = None
    analysis: Analysis | None = None
    others: tuple[Run, ...] = ()  # the same step on the same machine, with another recipe

    @cached_property
    def step_ms(self) -> float:
        """Median of the timed steps, else of the profiled ones; NaN when neither is known."""
        if self.run is not None and self.run.clock is not None and self.run.clock.step.values:
            return self.run.clock.step.median
        if self.analysis is not None and self.analysis.budget.steps:
            return self.analysis.budget.typical.wall_ms
        return math.nan

    @property
    def on_device(self) -> bool:
        """Whether the trace has a GPU's work."""
        return self.analysis is not None and self.analysis.budget.on_device

    @cached_property
    def rows(self) -> Rows | None:
        """The work of the trace; None without a trace.

        On a CPU the profiler slows every operator, so the times are scaled to the timed step;
        kernels of a GPU take as long as ever.
        """
        if self.analysis is None or not self.analysis.budget.steps:
            return None
        profiled = self.analysis.budget.typical.wall_ms
        scale = 1.0 if self.on_device or not profiled else min(1.0, self.step_ms / profiled)
        return Rows(self.analysis, scale)

    def term_ms(self, term: str) -> float:
        """Milliseconds of a term of the budget, median of the profiled steps; 0 without one."""
        steps = self.analysis.budget.steps if self.analysis is not None else ()
        return statistics.median([step.terms.get(term, 0.0) for step in steps] or [0.0])

    @cached_property
    def starved_ms(self) -> float:
        """Idle time of a device for want of launches, a step.

        The budget's term, less the profiler's own cost and what synchronising caused.
        """
        if self.analysis is None:
            return 0.0
        steps, syncs = self.analysis.windows, self.analysis.syncs
        slowed = self.analysis.budget.typical.wall_ms - self.step_ms
        after_syncs = float(syncs.idle[syncs.step >= 0].sum()) / 1e6 / max(len(steps), 1)
        caused = max(0.0, after_syncs - self.term_ms("synchronisation"))
        return self.term_ms("launch") - max(0.0, slowed) - caused

    @cached_property
    def card(self) -> Card | None:
        """The GPU that did the work, when the catalog knows it."""
        if self.run is not None and self.run.spec.device == "cuda":
            return find_card(self.run.environment.device_name)
        return find_card(str(self._device_properties.get("name", "")))

    @property
    def capacity_bytes(self) -> int | None:
        """Memory of the device that the step ran on."""
        if self.run is None:
            total = self._device_properties.get("totalGlobalMem")
            return int(total) if isinstance(total, (int, float)) else None
        if self.run.spec.device == "cuda":
            return self.run.memory.total if self.run.memory else None
        return self.run.environment.memory_bytes

    @property
    def timeline(self) -> MemoryTimeline | None:
        """Who held how much memory over one step."""
        return self.run.profile.memory if self.run is not None and self.run.profile else None

    @property
    def _device_properties(self) -> Mapping[str, Any]:
        listed = self.analysis.trace.properties.get("deviceProperties") if self.analysis else None
        return listed[0] if isinstance(listed, list) and listed else {}
