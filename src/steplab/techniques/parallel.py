"""How several ranks share one step: which gradients are reduced when, and what is sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from steplab.core import Run, Setting, Settings
from steplab.core.codec import decode
from steplab.core.errors import UserError
from steplab.techniques.compile import GRAPH_MODES, find_blocks
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.scheme_choice import DEFAULT_BUCKET_MB, suggest_schemes
from steplab.techniques.technique import Stage, StepParts, Technique

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from steplab.parallel.scheme import Scheme


@dataclass(frozen=True)
class ParallelSettings:
    """`naive`: one all-reduce per parameter after the backward. `flat`: one for all.

    `overlap`: each parameter as soon as its gradient is ready. `bucket`: several together. `ddp`:
    torch's DistributedDataParallel. `zero1`: each rank updates a part of the parameters. `fsdp`:
    each rank has a part of everything, by torch's fully_shard.
    """

    data: Literal["naive", "flat", "overlap", "bucket", "ddp", "zero1", "fsdp"] = "bucket"
    bucket_mb: int = DEFAULT_BUCKET_MB  # for bucket and ddp
    reshard: bool = True  # for fsdp: free a block's weights between its forward and its backward
    replicate: int = 1  # for fsdp: so many groups of ranks with all shards each
    # For fsdp: so many blocks are gathered together. Every gathering costs the host about 4 ms.
    together: int = 1
    reduce: Literal["fp32", "bf16"] = "fp32"  # dtype in which gradients are sent and added
    exact: bool = False  # the same bits on 1, 2, 4 ... ranks
    expert: int = 1  # ranks that share one set of routed experts, each with its part of them


# Settings that mean something to some schemes only.
BELONGS_TO = {
    "bucket_mb": ("bucket", "ddp"),
    "reshard": ("fsdp",),
    "replicate": ("fsdp",),
    "together": ("fsdp",),
}
SMALL_BYTES = 64 * 2**10  # of metrics and norms, in one step
SHARES_OPTIMIZER = ("zero1", "fsdp")
WITH_EXPERTS = ("naive", "flat", "overlap", "bucket", "fsdp")  # those that `expert` goes with


class Parallel(Technique):
    """N ranks with A micro-batches each compute what one rank with N * A would."""

    stage = Stage.PARALLEL
    settings: ClassVar[type] = ParallelSettings
    replaces = ("DistributedDataParallel", "fully_shard")

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """Settings must belong to the scheme, and counts be at least 1."""
        super().check(settings, name)
        for key, schemes in BELONGS_TO.items():
            if key in settings and settings["data"] not in schemes:
                raise UserError(
                    f"{name}.{key} means nothing to {name}={settings['data']}.",
                    f"It belongs to {' and '.join(schemes)}.",
                )
        for key in ("bucket_mb", "replicate", "together", "expert"):
            if int(settings.get(key, 1)) < 1:
                raise UserError(f"{name}.{key} must be at least 1, not {settings[key]}.")
        if settings.get("exact") and "reduce" in settings:
            raise UserError(
                f"{name}.exact sends gradients as they are, so {name}.reduce means nothing.",
                "Leave one of them out.",
            )

    def conflict(self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]) -> str:
        """What would be wrong, or compile into pieces, is refused."""
        data, compile_ = settings["data"], recipe.get("compile", {})
        if "cuda_graph" in recipe:
            return "cuda_graph replays a step without the host, which has to call its collectives"
        if int(settings.get("expert", 1)) > 1:
            reason = self._conflict_of_experts(settings, recipe)
            if reason:
                return reason
        if compile_.get("mode") in GRAPH_MODES:
            mode = compile_["mode"]
            return f"compile.mode={mode} reuses the memory of gradients that are still being sent"
        if data == "fsdp" and compile_.get("scope") in ("whole", "loss"):
            return "fsdp gathers block by block, which a graph of the whole model cannot wait for"
        if data == "ddp" and compile_.get("scope") == "loss":
            return "ddp wraps the model, which a graph of model and loss would cut into buckets"
        if data not in SHARES_OPTIMIZER:
            return ""
        if compile_.get("optimizer"):
            return f"{data} shares the update out, which compile.optimizer cannot see"
        if recipe.get("precision", {}).get("dtype") == "fp16":
            return f"{data} shows fp16's scaler the gradients of one rank, so ranks would disagree"
        return ""

    def _conflict_of_experts(
        self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]
    ) -> str:
        """Rows that travel are counted on the host, and none is left behind."""
        if recipe.get("compile", {"fullgraph": False}).get("fullgraph", True):
            return (
                "parallel.expert counts rows on the host, which no graph can span "
                "(compile.fullgraph=false compiles around it)"
            )
        if recipe.get("impl", {}).get("experts") == "capacity":
            return "parallel.expert drops no token, impl.experts=capacity does"
        if settings["data"] not in WITH_EXPERTS:
            known = ", ".join(WITH_EXPERTS)
            return f"parallel.expert goes with {known}, not with {settings['data']}"
        if int(settings.get("replicate", 1)) > 1:
            return "parallel.expert makes replicas of its own, so parallel.replicate cannot"
        return ""

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Attach the scheme; a process that has joined no group is a group of one."""
        from steplab.parallel.scheme import share_weights
        from steplab.parallel.world import join_alone

        join_alone()
        share_weights(parts.model, parts.master_weights)
        chosen: ParallelSettings = decode(ParallelSettings, dict(settings), "parallel")
        mesh = self._share_out_experts(parts, chosen) if chosen.expert > 1 else None
        parts.scheme = self._scheme(parts, chosen, mesh)
        parts.master_weights = parts.scheme.own_weights(parts.master_weights)

    def _share_out_experts(self, parts: StepParts, chosen: ParallelSettings) -> DeviceMesh:
        from steplab.parallel.experts import check_expert_parts, expert_part, shard_experts
        from steplab.parallel.mesh import rank_mesh
        from steplab.parallel.world import current_world

        check_expert_parts(parts.model, chosen.expert, current_world().size)
        mesh = rank_mesh(parts.device.type, chosen.expert)
        for whole, part in shard_experts(parts.model, mesh, chosen.exact).items():
            if whole in parts.master_weights:
                parts.master_weights[part] = expert_part(parts.master_weights.pop(whole), mesh)
        return mesh

    def _scheme(
        self, parts: StepParts, chosen: ParallelSettings, mesh: DeviceMesh | None
    ) -> Scheme:
        import torch

        from steplab.parallel.scheme import Reduction

        dtype = torch.bfloat16 if chosen.reduce == "bf16" else torch.float32
        reduction = Reduction(dtype, chosen.exact)
        if chosen.data == "fsdp":
            from steplab.parallel.sharding import Sharded

            blocks = find_blocks(parts.model)
            how = (chosen.reshard, chosen.replicate, chosen.together, mesh)
            return Sharded(parts.model, blocks, reduction, *how)
        if chosen.data == "zero1":
            from steplab.parallel.zero import Zero1

            return Zero1(parts.model, reduction)
        if chosen.data == "ddp":
            from steplab.parallel.ddp import Ddp

            return Ddp(parts.model, reduction, chosen.bucket_mb)
        from steplab.parallel.gradients import Replicated

        bucket_bytes = {"flat": math.inf, "bucket": chosen.bucket_mb * 2**20}.get(chosen.data, 0)
        overlaps = chosen.data in ("overlap", "bucket")
        return Replicated(parts.model, reduction, bucket_bytes, overlaps, mesh)

    def remedy(self, run: Run) -> str:
        """What every rank has no room for may fit in parts."""
        whole = run.spec.recipe.techniques["parallel"]["data"] != "fsdp"
        if run.status != "oom" or run.spec.ranks == 1 or not whole:
            return ""
        return "a smaller --batch, or parallel=fsdp, with which a rank keeps a part of the model"

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """The collectives of a step must be those that the scheme had planned."""
        if run.communication is None:
            return ""
        seen = {(one.op, one.ranks): one for one in run.communication.collectives}
        for asked in run.communication.planned:
            found = seen.get((asked.op, asked.ranks))
            calls, sent = (found.calls, found.bytes) if found else (0, 0)
            # Beside the gradients and weights go metrics and norms.
            wrong_bytes = not asked.bytes <= sent <= asked.bytes + SMALL_BYTES
            if wrong_bytes or (asked.calls and calls != asked.calls):
                wanted = f"{asked.calls or 'some'} calls with {asked.bytes:,} bytes"
                return (
                    f"{settings['data']} needs {wanted} of {asked.op} over {asked.ranks} ranks, "
                    f"but there were {calls} with {sent:,}"
                )
        return ""

    def unverified(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Not every combination has a plan."""
        planned = run.communication is None or run.communication.planned
        trains = run.spec.mode in ("forward+backward", "full")
        return "" if planned or not trains else "unverified: no plan to compare collectives with"

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Nothing on one rank: there is nobody to share with."""
        return suggest_schemes(context, current)


TECHNIQUE = Parallel()
