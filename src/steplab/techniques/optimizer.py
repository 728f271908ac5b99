"""Implementation of the optimizer's update: op by op, in one kernel, or in one pass of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from steplab.core import Run, Setting, Settings
from steplab.core.codec import type_hints
from steplab.core.errors import Unsupported
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique

ONE_PASS = "one-pass"
ADAM_8BIT = "adam-8bit"  # changes what is computed: `tune` tries it where it is allowed by name
# torch refuses complex parameters; torchao leaves their imaginary parts out without a word.
REAL_ONLY = ("fused", ADAM_8BIT)
STATE_SAVED = 0.74  # of fp32 moments: a byte of four, and a scale of four bytes for 256 numbers


@dataclass(frozen=True)
class OptimizerSettings:
    """`forloop`: tensor by tensor. `foreach`: op by op over lists. `fused`: one kernel.

    `one-pass`: AdamW in one kernel for each large tensor and for 64 small ones, which clips too and
    keeps fp32 weights beside 16-bit ones; on a CPU op by op.

    `adam-8bit`: torchao's AdamW, whose moments are kept in 8 bits (`modules/adam_8bit.py`).
    """

    impl: Literal["forloop", "foreach", "fused", "one-pass", "adam-8bit"] = "fused"


class Optimizer(Technique):
    """Without it torch chooses: foreach on CUDA, forloop on a CPU."""

    stage = Stage.OPTIMIZER
    settings: ClassVar[type] = OptimizerSettings

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Pass the choice to the workload's optimizer, or replace it by ours."""
        asked = settings["impl"]
        if asked in REAL_ONLY and any(p.is_complex() for p in parts.model.parameters()):
            raise Unsupported(
                f"optimizer={asked} takes no complex parameters, which this model has.",
                "Use optimizer=foreach or optimizer=one-pass.",
            )
        if asked == ONE_PASS:
            from steplab.modules.optimizer import OnePassAdamW

            parts.replace_optimizer = OnePassAdamW.from_adamw
            return
        if asked == ADAM_8BIT:
            from steplab.modules.adam_8bit import from_adamw, rounded_parameters

            chosen = rounded_parameters(parts.model)
            parts.replace_optimizer = lambda optimizer: from_adamw(optimizer, chosen)
            parts.state_format = ADAM_8BIT
            parts.settle_steps = 2  # it compiles its update, once for every shape
            return
        parts.optimizer_options = (
            {"foreach": False, "fused": False} if asked == "forloop" else {str(asked): True}
        )

    def conflict(self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]) -> str:
        """There is nothing left to compile in the one pass, and 8 bits have limits.

        Compiled updates read rates from tensors; outside a capture torch's foreach takes none.
        """
        is_compiled = bool(recipe.get("compile", {}).get("optimizer"))
        if settings["impl"] == ONE_PASS and is_compiled:
            return "one-pass is a kernel already, so compile.optimizer has nothing to do"
        if settings["impl"] == "foreach" and is_compiled and "cuda_graph" not in recipe:
            return "torch's foreach update takes no rate that can change without compiling it anew"
        return _conflict_of_8bit(recipe) if settings["impl"] == ADAM_8BIT else ""

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Suggest what needs fewer passes than the update that ran, the fewest first."""
        if context.objective == "memory":
            return self._fewer_bits(context, current)
        known = [impl for impl in get_args(type_hints(self.settings)["impl"]) if impl != ADAM_8BIT]
        known = known if context.on_cuda else known[:-1]  # one-pass is a kernel on a GPU only
        ran = context.run.ran.optimizer if context.run.ran else ""
        fewer = known[known.index(ran) + 1 :] if ran in known else ()
        return [Suggestion({"impl": impl}, {"phase:optimizer": 1.0}) for impl in reversed(fewer)]

    def _fewer_bits(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Name state in 8 bits as what it is; it is tried where that was allowed."""
        if current.get("impl") == ADAM_8BIT or context.run.spec.mode != "full":
            return []
        refusal = ""
        if ADAM_8BIT not in context.allowed:
            refusal = f"changes the state's precision, so only with --allow {ADAM_8BIT}"
        saved = {"memory:optimizer state": STATE_SAVED}
        return [Suggestion({"impl": ADAM_8BIT}, saved, refusal=refusal)]

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """The trace must show the update that was asked for."""
        ran = run.ran.optimizer if run.ran else ""
        if ran and ran.split()[0] != settings["impl"]:
            return f"optimizer {settings['impl']!r} was asked for, but {ran} ran"
        return ""

    def unverified(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Without an update there is nothing to see."""
        return "" if run.spec.mode == "full" else f"no effect: {run.spec.mode} has no optimizer"


def _conflict_of_8bit(recipe: Mapping[str, Settings]) -> str:
    if recipe.get("compile", {}).get("optimizer"):
        return f"{ADAM_8BIT} compiles its update by itself, so compile.optimizer has nothing to do"
    if "cuda_graph" in recipe:
        return f"{ADAM_8BIT} counts its steps on the host, so a replay would not count"
    if "parallel" in recipe:
        return f"{ADAM_8BIT} has been tried on one rank only"
    return ""


TECHNIQUE = Optimizer()
