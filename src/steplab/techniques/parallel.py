"""How several ranks share one step: which gradients are reduced when, and what is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from steplab.core import Setting, Settings
from steplab.core.codec import decode
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique

if TYPE_CHECKING:
    from steplab.parallel.scheme import Scheme


@dataclass(frozen=True)
class ParallelSettings:
    """`naive`: one all-reduce per parameter after the backward. `flat`: one for all.

    `overlap`: each parameter as soon as its gradient is ready.
    """

    data: Literal["naive", "flat", "overlap"] = "overlap"


class Parallel(Technique):
    """N ranks with A micro-batches each compute what one rank with N * A would."""

    stage = Stage.PARALLEL
    settings: ClassVar[type] = ParallelSettings
    excludes = ("cuda_graph",)

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Attach the scheme; a process that has joined no group is a group of one."""
        from steplab.parallel import gradients
        from steplab.parallel.world import join_alone

        join_alone()
        chosen: ParallelSettings = decode(ParallelSettings, dict(settings), "parallel")
        schemes: dict[str, type[Scheme]] = {
            "naive": gradients.Naive,
            "flat": gradients.Flat,
            "overlap": gradients.Overlap,
        }
        parts.scheme = schemes[chosen.data](parts.model)

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Nothing on one rank: there is nobody to share with."""
        return []


TECHNIQUE = Parallel()
