"""Situation: what a technique may know of a step when it says what it could do for it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from steplab.hardware.catalog import Card, find_card
from steplab.record import Run
from steplab.spec import Recipe
from steplab.spec.recipe import Setting

Objective = Literal["time", "memory"]

# Parts of a step that a technique may name, each with the largest share of it that could go:
#   "term:launch"          a term of the time budget (steplab.record.budget.TERMS)
#   "kind:matmul"          categories of work whose names begin so (steplab.trace.categories)
#   "lost:matmul"          of these, the time beyond the roofline
#   "phase:optimizer"      a phase of the step, as the clock saw it
#   "op:attention"         the modules that declare an op, forward and backward
#   "memory:activations"   bytes at the peak (steplab.record.memory_timeline.KINDS)
Relief = Mapping[str, float]


@dataclass(frozen=True)
class Offer:
    """Settings of a technique that are worth trying, and the parts of the step they can shrink."""

    settings: Mapping[str, Setting]
    relief: Relief = field(default_factory=dict)  # empty: nobody knows, and so no ceiling either


@dataclass(frozen=True)
class Situation:
    """A measured step and what is wanted of it."""

    run: Run
    objective: Objective = "time"
    impls: Mapping[str, str] = field(default_factory=dict)  # op -> implementation that ran
    first_impls: Mapping[str, str] = field(default_factory=dict)  # the same, in the baseline

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
