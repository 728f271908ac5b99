"""The whole step as one CUDA graph: captured once, then replayed with a single launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from steplab.core import Run, Setting, Settings
from steplab.core.errors import Unsupported, UserError
from steplab.techniques.compile import GRAPH_MODES
from steplab.techniques.context import StepContext, Suggestion, format_waits
from steplab.techniques.technique import Stage, StepParts, Technique


@dataclass(frozen=True)
class CudaGraphSettings:
    """`step`: everything from the forward pass to the update; for inference, the forward pass."""

    scope: Literal["step"] = "step"
    # The first creates the optimizer's state and compiles; the last must not wait for the device.
    warmup: int = 3


class CudaGraph(Technique):
    """Needs static shapes and a step in which the host never waits for the device."""

    stage = Stage.GRAPH
    settings: ClassVar[type] = CudaGraphSettings

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """At least one plain step has to show that the step can be captured."""
        super().check(settings, name)
        if int(settings.get("warmup", 3)) < 1:
            raise UserError(f"{name}.warmup must be at least 1, not {settings['warmup']}.")

    def conflict(self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]) -> str:
        """CUDA graphs made by Inductor cannot be captured into another graph."""
        mode = recipe.get("compile", {}).get("mode")
        if mode in GRAPH_MODES:
            return f"compile.mode={mode} has CUDA graphs of its own, which cannot be captured"
        recompute = recipe.get("checkpointing", {}) if "compile" not in recipe else {}
        if recompute.get("how") in ("blocks", "selective") and recompute.get("rng", True):
            return (
                "checkpointing reads the state of the random numbers, which a capture forbids "
                "(checkpointing.rng=false where no dropout is recomputed)"
            )
        return ""

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Ask for a capture after the plain steps."""
        if parts.device.type != "cuda":
            raise Unsupported("cuda_graph needs a CUDA GPU.", "Add cuda_graph=off to the recipe.")
        parts.graph_warmup = int(settings.get("warmup", 3))
        # The plain steps, the one that captures, and a first pure replay.
        parts.settle_steps = max(parts.settle_steps, parts.graph_warmup + 2)

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """One launch for everything saves the time in which the device waited for launches."""
        settings, savings = {"scope": "step"}, {"term:launch": 1.0, "term:dispatch": 1.0}
        mode = context.recipe.techniques.get("compile", {}).get("mode")
        if current or not context.on_cuda or mode in GRAPH_MODES:
            return []
        refusal = (
            f"the host waits for the device: {format_waits(context.waits)}" if context.waits else ""
        )
        return [Suggestion(settings, savings, refusal=refusal)]

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """The profiled step must have been a replay."""
        if run.ran is not None and not run.ran.graph_launches:
            return "cuda_graph was asked for, but no graph was replayed"
        return ""


TECHNIQUE = CudaGraph()
