"""Batches fetched and copied to the device while the step before them runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from steplab.core import Setting, Settings
from steplab.core.errors import UserError
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique


@dataclass(frozen=True)
class PrefetchSettings:
    """How many micro-batches wait on the device; each takes memory of its own."""

    batches: int = 2


class Prefetch(Technique):
    """A thread of its own makes the batches; on CUDA it copies them on a stream of its own."""

    stage = Stage.DATA
    settings: ClassVar[type] = PrefetchSettings

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """At least one batch has to be fetched ahead."""
        super().check(settings, name)
        if int(settings.get("batches", 2)) < 1:
            raise UserError(f"{name}.batches must be at least 1, not {settings['batches']}.")

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Ask for the batches."""
        parts.batches_ahead = int(settings["batches"])

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Saves the time in which the device waited for a batch."""
        return [] if current else [Suggestion({"batches": 2}, {"term:data wait": 1.0})]


TECHNIQUE = Prefetch()
