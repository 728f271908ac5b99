"""How several ranks share one step: which gradients are reduced when, and what is sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from steplab.core import Setting, Settings
from steplab.core.codec import decode
from steplab.core.errors import UserError
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
    expert: int = 1  # ranks that share one set of routed experts, each with its part of them


class Parallel(Technique):
    """N ranks with A micro-batches each compute what one rank with N * A would."""

    stage = Stage.PARALLEL
    settings: ClassVar[type] = ParallelSettings
    excludes = ("cuda_graph",)

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """Numbers must be in range."""
        super().check(settings, name)
        if int(settings.get("expert", 1)) < 1:
            raise UserError(f"{name}.expert must be at least 1, not {settings['expert']}.")

    def conflict(self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]) -> str:
        """Rows that travel are counted on the host, and none is left behind."""
        if int(settings.get("expert", 1)) == 1:
            return ""
        if recipe.get("compile", {"fullgraph": False}).get("fullgraph", True):
            return (
                "parallel.expert counts rows on the host, which no graph can span "
                "(compile.fullgraph=false compiles around it)"
            )
        if recipe.get("impl", {}).get("experts") == "capacity":
            return "parallel.expert drops no token, impl.experts=capacity does"
        return ""

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Attach the scheme; a process that has joined no group is a group of one."""
        from steplab.parallel import gradients
        from steplab.parallel.experts import check_expert_parts, expert_part, shard_experts
        from steplab.parallel.mesh import rank_mesh
        from steplab.parallel.world import join_alone

        world = join_alone()
        chosen: ParallelSettings = decode(ParallelSettings, dict(settings), "parallel")
        schemes: dict[str, type[Scheme]] = {
            "naive": gradients.Naive,
            "flat": gradients.Flat,
            "overlap": gradients.Overlap,
        }
        mesh = None
        if chosen.expert > 1:
            check_expert_parts(parts.model, chosen.expert, world.size)
            mesh = rank_mesh(parts.device.type, chosen.expert)
            for whole, part in shard_experts(parts.model, mesh).items():
                if whole in parts.master_weights:
                    master = parts.master_weights.pop(whole)
                    parts.master_weights[part] = expert_part(master, mesh)
        parts.scheme = schemes[chosen.data](parts.model, world, mesh)

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Nothing on one rank: there is nobody to share with."""
        return []


TECHNIQUE = Parallel()
