"""Implementation of the optimizer's update: one kernel per tensor, per list, or for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from steplab.record import Run
from steplab.spec.recipe import Setting
from steplab.techniques.technique import Stage, StepParts, Technique


@dataclass(frozen=True)
class OptimizerSettings:
    """`forloop`: tensor by tensor. `foreach`: op by op over lists. `fused`: one kernel."""

    impl: Literal["forloop", "foreach", "fused"] = "fused"


class Optimizer(Technique):
    """Left out, torch chooses: foreach on CUDA, forloop on CPU."""

    summary = "optimizer update as forloop, foreach or fused"
    stage = Stage.OPTIMIZER
    settings: ClassVar[type] = OptimizerSettings

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Pass the choice to the workload's optimizer."""
        asked = settings["impl"]
        parts.optimizer_options = (
            {"foreach": False, "fused": False} if asked == "forloop" else {str(asked): True}
        )

    def deviation(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Compare with the update that the trace shows."""
        ran = run.ran.optimizer if run.ran else ""
        if ran and ran != settings["impl"]:
            return f"optimizer {settings['impl']!r} was asked for, but {ran} ran"
        return ""

    def doubt(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Only a full step has an update."""
        return "" if run.spec.mode == "full" else f"no effect: {run.spec.mode} has no optimizer"


TECHNIQUE = Optimizer()
