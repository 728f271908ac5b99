"""Batches fetched and copied to the device while the step before them runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from steplab.core import Run, Setting, Settings
from steplab.core.errors import UserError
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique

MOST_WORKERS = 4  # of a suggestion: each has the dataset's memory


@dataclass(frozen=True)
class PrefetchSettings:
    """How many micro-batches wait on the device, each with memory of its own, and who makes them.

    `workers` are processes of the DataLoader that a model of one's own reads; 0: as it says itself.
    """

    batches: int = 2
    workers: int = 0


class Prefetch(Technique):
    """A thread of its own makes the batches; on CUDA it copies them on a stream of its own.

    What is written in Python keeps the step's thread waiting all the same: that is for workers.
    """

    stage = Stage.DATA
    settings: ClassVar[type] = PrefetchSettings

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """At least one batch has to be fetched ahead."""
        super().check(settings, name)
        if int(settings.get("batches", 2)) < 1:
            raise UserError(f"{name}.batches must be at least 1, not {settings['batches']}.")
        if int(settings.get("workers", 0)) < 0:
            raise UserError(f"{name}.workers is {settings['workers']}.", "Give 0 or more.")

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Ask for the batches."""
        parts.batches_ahead = int(settings["batches"])
        parts.loader_workers = int(settings.get("workers", 0))

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Saves the time in which the step waited for a batch."""
        savings = {"term:data wait": 1.0}
        ahead = {"batches": 2, **current}
        found = [] if current else [Suggestion(ahead, savings)]
        ran = context.run.ran
        if ran is not None and ran.loader_workers == 0:
            workers = min(MOST_WORKERS, max(1, context.run.environment.cores // 2))
            # After the thread, which needs no processes; it may not be enough.
            found.append(Suggestion({**ahead, "workers": workers}, savings, prior=0.9))
        return found

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """The loader must have had its workers."""
        wanted, ran = int(settings.get("workers", 0)), run.ran
        if not wanted or ran is None or ran.loader_workers == wanted:
            return ""
        return f"the loader had {ran.loader_workers} workers instead of {wanted}"


TECHNIQUE = Prefetch()
