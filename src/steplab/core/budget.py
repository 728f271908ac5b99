"""Budget: where the wall time of a step went. The terms add up; what is left is printed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

# Every instant of a step belongs to the first of these that was going on.
TERMS = (
    "kernels",  # a kernel that is not communication ran
    "communication",  # only communication kernels ran
    "copies",  # only copies or fills ran
    "data wait",  # nothing ran; the host was fetching a batch
    "synchronization",  # nothing ran; the host was in a call that waits for the device
    "launch",  # nothing ran; the host had not yet launched the next work
    "dispatch",  # nothing ran; the next work was launched already, the device had not begun it
)


@dataclass(frozen=True)
class Category:
    """Kernels of one kind in one step."""

    name: str
    ms: float  # wall time counted to this category; all categories sum to the term `kernels`
    launches: int
    ideal_ms: float | None = None  # roofline time of those kernels that have a model
    modeled_ms: float = 0.0  # the part of `ms` whose kernels have a model

    @property
    def lost_ms(self) -> float | None:
        """Time beyond the ideal, of the modeled part."""
        return None if self.ideal_ms is None else self.modeled_ms - self.ideal_ms


@dataclass(frozen=True)
class StepBudget:
    """One profiled step. On a CPU-only trace `kernels` are operators and `launch` is the host."""

    number: int
    wall_ms: float
    terms: Mapping[str, float]  # ms, keys of TERMS
    categories: tuple[Category, ...] = ()  # most time first

    @property
    def residual_ms(self) -> float:
        """Wall time that no term explains."""
        return self.wall_ms - sum(self.terms.values())


@dataclass(frozen=True)
class Budget:
    """The profiled steps of one trace, or of all traces of a Run."""

    steps: tuple[StepBudget, ...]
    on_device: bool  # False: a trace without a GPU
    unprofiled_ms: float | None = None  # median of the same step without the profiler
    peaks: Mapping[str, str] = field(default_factory=dict)  # where each ideal comes from
    notes: tuple[str, ...] = ()

    @property
    def typical(self) -> StepBudget:
        """The step whose wall time is the (lower) median."""
        walls = [step.wall_ms for step in self.steps]
        return self.steps[walls.index(statistics.median_low(walls))]

    @property
    def profiled_ratio(self) -> float | None:
        """Profiled over unprofiled step time; above 1 is the profiler's own cost."""
        return self.typical.wall_ms / self.unprofiled_ms if self.unprofiled_ms else None

    def begins_with(self, other: Budget) -> bool:
        """Whether its first steps are those of `other`, to a microsecond."""
        first = self.steps[: len(other.steps)]
        return [*map(_rounded, first)] == [*map(_rounded, other.steps)]


def _rounded(step: StepBudget) -> tuple[object, ...]:
    """All numbers of a step to a microsecond: the last digits may differ between machines."""
    parts = sorted(
        (c.name, c.launches, round(c.ms, 3), round(c.ideal_ms or 0, 3)) for c in step.categories
    )
    terms = {term: round(ms, 3) for term, ms in step.terms.items() if round(ms, 3)}
    return step.number, round(step.wall_ms, 3), terms, parts
