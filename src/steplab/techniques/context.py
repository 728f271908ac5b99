"""StepContext: what a technique may know of a step when it suggests a change. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from steplab.core import Recipe, Run, Setting, Settings
from steplab.hardware.catalog import Card, find_card

Objective = Literal["time", "memory"]

# Parts of a step that a technique may name, each with the largest share of it that could go:
#   "term:launch"          a term of the time budget (steplab.core.budget.TERMS)
#   "kind:matmul"          categories of work whose names begin so (steplab.trace.categories)
#   "lost:matmul"          of these, the time beyond the roofline
#   "phase:optimizer"      a phase of the step, as the clock saw it
#   "op:attention"         the modules that declare an op, forward and backward, and the idle time
#                          of a GPU that their kernels end
#   "ranks:exposed communication"  in which ranks communicated and did nothing else
#   "memory:activations"   bytes at the peak (steplab.core.run.MEMORY_KINDS)
Savings = Mapping[str, float]


@dataclass(frozen=True)
class Suggestion:
    """Settings of a technique that are worth trying, and the parts of the step they can shrink."""

    settings: Mapping[str, Setting]
    savings: Savings = field(default_factory=dict)  # empty: nobody knows, and so no ceiling either
    # Of two suggestions with equal ceilings the likelier is tried first: below 1 for one that
    # nobody who has measured both would choose.
    prior: float = 1.0
    effort: float = 1.0  # times as long to try as usual: begun only where there is time for it
    requires: Mapping[str, Settings] = field(default_factory=dict)  # other techniques that it needs
    refusal: str = ""  # why it cannot be tried on the step as it is
    reason: str = ""  # what speaks for it, in words and numbers, beside the parts that it shrinks


@dataclass(frozen=True)
class StepContext:
    """A measured step and what is wanted of it."""

    run: Run
    objective: Objective = "time"
    impls: Mapping[str, str] = field(default_factory=dict)  # op -> implementation that ran
    first_impls: Mapping[str, str] = field(default_factory=dict)  # the same, in the baseline
    waits: tuple[str, ...] = ()  # lines in which the host waits for the device, one per wait
    # Changes that could not run on this model, as a recipe names them, and why.
    failed: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()  # settings that change what is computed and may be tried

    @property
    def recipe(self) -> Recipe:
        """What the step is made with now."""
        return self.run.spec.recipe

    @property
    def on_cuda(self) -> bool:
        """Whether the step runs on a GPU."""
        return self.run.spec.device == "cuda"

    @property
    def card(self) -> Card | None:
        """The GPU, where the catalog knows it."""
        return find_card(self.run.environment.device_name) if self.on_cuda else None


def format_waits(waits: Sequence[str]) -> str:
    """Name the lines of waits, the most frequent first: `grouped_mm/loop.py:34 x 18`."""
    counted = Counter(waits).most_common()
    named = [f"{line} x {count}" for line, count in counted[:3]]
    more = sum(count for _, count in counted[3:])
    return ", ".join([*named, f"{more} more"] if more else named)
