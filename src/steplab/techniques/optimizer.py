"""Implementation of the optimizer's update: op by op, in one kernel, or in one pass of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from steplab.core import Run, Setting, Settings
from steplab.core.codec import type_hints
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique

ONE_PASS = "one-pass"


@dataclass(frozen=True)
class OptimizerSettings:
    """`forloop`: tensor by tensor. `foreach`: op by op over lists. `fused`: one kernel.

    `one-pass`: AdamW in one kernel per tensor that clips too, and keeps fp32 weights beside 16-bit
    ones; on a CPU op by op.
    """

    impl: Literal["forloop", "foreach", "fused", "one-pass"] = "fused"


class Optimizer(Technique):
    """Without it torch chooses: foreach on CUDA, forloop on a CPU."""

    stage = Stage.OPTIMIZER
    settings: ClassVar[type] = OptimizerSettings

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Pass the choice to the workload's optimizer, or replace it by ours."""
        asked = settings["impl"]
        if asked == ONE_PASS:
            from steplab.modules.optimizer import OnePassAdamW

            parts.replace_optimizer = OnePassAdamW.from_adamw
            return
        parts.optimizer_options = (
            {"foreach": False, "fused": False} if asked == "forloop" else {str(asked): True}
        )

    def conflict(self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]) -> str:
        """There is nothing left to compile in the one pass."""
        if settings["impl"] == ONE_PASS and recipe.get("compile", {}).get("optimizer"):
            return "one-pass is a kernel already, so compile.optimizer has nothing to do"
        return ""

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Suggest what needs fewer passes than the update that ran, the fewest first."""
        known = get_args(type_hints(self.settings)["impl"])
        known = known if context.on_cuda else known[:-1]  # one-pass is a kernel on a GPU only
        ran = context.run.ran.optimizer if context.run.ran else ""
        fewer = known[known.index(ran) + 1 :] if ran in known else ()
        return [Suggestion({"impl": impl}, {"phase:optimizer": 1.0}) for impl in reversed(fewer)]

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """The trace must show the update that was asked for."""
        ran = run.ran.optimizer if run.ran else ""
        if ran and ran.split()[0] != settings["impl"]:
            return f"optimizer {settings['impl']!r} was asked for, but {ran} ran"
        return ""

    def unverified(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Without an update there is nothing to see."""
        return "" if run.spec.mode == "full" else f"no effect: {run.spec.mode} has no optimizer"


TECHNIQUE = Optimizer()
