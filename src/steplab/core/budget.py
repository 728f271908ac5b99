"""Budget: where the wall time of a step went. The terms add up; what is left is the residual."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
# What terms and categories are called without a GPU.
ON_HOST = {"kernels": "operators", "launch": "host", "matmul fp32 simt": "matmul fp32"}
CLOSED = 0.02  # a residual above this share of a step is pointed out
COMPUTED_AGAIN = "computed again from the first trace: the budget stored with the Run differs"


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

    @classmethod
    def total(cls, name: str, categories: Sequence[Category]) -> Category:
        """Return several categories as one."""
        ideals = [c.ideal_ms for c in categories if c.ideal_ms is not None]
        return cls(
            name,
            ms=sum(c.ms for c in categories),
            launches=sum(c.launches for c in categories),
            ideal_ms=sum(ideals) if ideals else None,
            modeled_ms=sum(c.modeled_ms for c in categories),
        )


@dataclass(frozen=True)
class StepBudget:
    """One profiled step. Without a GPU `kernels` are operators and `launch` is the host."""

    number: int
    wall_ms: float
    terms: Mapping[str, float]  # ms, keys of TERMS
    categories: tuple[Category, ...] = ()  # most time first

    @property
    def residual_ms(self) -> float:
        """Wall time that no term explains."""
        return self.wall_ms - sum(self.terms.values())

    @property
    def decimals(self) -> int:
        """Decimals of all milliseconds of a table of this step, so that they line up.

        One digit more than four significant ones of the step.
        """
        return max(0, 4 - math.floor(math.log10(max(self.wall_ms, 1e-6))))

    def share(self, ms: float) -> float:
        """Return `ms` as a fraction of the step; 0 for a step without length."""
        return ms / self.wall_ms if self.wall_ms else 0.0


@dataclass(frozen=True)
class Budget:
    """The profiled steps of one trace, or of all traces of a Run."""

    steps: tuple[StepBudget, ...]
    on_device: bool  # False: a trace without a GPU
    unprofiled_ms: float | None = None  # median of the same step without the profiler
    peaks: Mapping[str, str] = field(default_factory=dict)  # where each ideal comes from
    notes: tuple[str, ...] = ()
    marked: bool = True  # False: nothing marks the steps, so all of the recording counts as one

    @property
    def typical(self) -> StepBudget:
        """The step whose wall time is the (lower) median of those in which something ran."""
        steps = self.worked
        walls = [step.wall_ms for step in steps]
        return steps[walls.index(statistics.median_low(walls))]

    @property
    def worked(self) -> tuple[StepBudget, ...]:
        """The steps in which something ran; all, if nothing ever did."""
        busy = ("kernels", "communication", "copies")
        return tuple(s for s in self.steps if any(s.terms.get(t) for t in busy)) or self.steps

    @property
    def open_steps(self) -> tuple[StepBudget, ...]:
        """The steps whose residual is above CLOSED: no event explains that part of them."""
        return tuple(s for s in self.steps if abs(s.residual_ms) > CLOSED * s.wall_ms)

    @property
    def profiled_ratio(self) -> float | None:
        """Profiled over unprofiled step time; above 1 is the profiler's own cost."""
        return self.typical.wall_ms / self.unprofiled_ms if self.unprofiled_ms else None

    def term_name(self, term: str) -> str:
        """Return what a term or category is called: without a GPU there are operators, a host."""
        return term if self.on_device else ON_HOST.get(term, term)

    def begins_with(self, other: Budget) -> bool:
        """Whether its first steps are those of `other`, to a microsecond."""
        first = self.steps[: len(other.steps)]
        return [*map(_rounded, first)] == [*map(_rounded, other.steps)]


def true_budget(stored: Budget | None, traced: Budget | None) -> Budget | None:
    """Return the budget that counts for a Run; None where no step was profiled.

    The stored one, which has the steps of all traces; but `traced`, what the first trace gives
    now, where nothing is stored or an earlier version read the same trace differently.
    """
    if stored and traced and traced.steps and not stored.begins_with(traced):
        return replace(traced, notes=(*traced.notes, COMPUTED_AGAIN))
    budget = stored or traced
    return budget if budget is not None and budget.steps else None


def _rounded(step: StepBudget) -> tuple[object, ...]:
    """All numbers of a step to a microsecond: the last digits may differ between machines."""
    parts = sorted(
        (c.name, c.launches, round(c.ms, 3), round(c.ideal_ms or 0, 3)) for c in step.categories
    )
    terms = {term: round(ms, 3) for term, ms in step.terms.items() if round(ms, 3)}
    return step.number, round(step.wall_ms, 3), terms, parts
