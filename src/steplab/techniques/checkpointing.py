"""Activations recomputed in the backward pass instead of kept: memory for time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from steplab.core import Setting, Settings
from steplab.core.errors import UserError
from steplab.techniques.compile import repeated_blocks
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique

if TYPE_CHECKING:
    from torch import nn

TRAINING = ("forward+backward", "full")


@dataclass(frozen=True)
class CheckpointingSettings:
    """`blocks`: every n-th repeated block. `budget`: the compiler chooses what to recompute.

    `elementwise`: the compiler recomputes norms' outputs, gates and casts that products of the
    backward read. By itself it does so only inside kernels that are there anyway.
    """

    how: Literal["blocks", "budget", "elementwise"] = "blocks"
    every: int = 1  # blocks 0, n, 2n, ... are recomputed
    keep: float = 0.5  # for `budget`: share of the activations' bytes that may be kept
    rng: bool = True  # the same dropout again; false lets a CUDA graph capture the step


class Checkpointing(Technique):
    """A block keeps its inputs only and repeats its forward pass when its gradient is computed."""

    stage = Stage.MEMORY
    settings: ClassVar[type] = CheckpointingSettings

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """Numbers must be in range."""
        super().check(settings, name)
        if int(settings.get("every", 1)) < 1:
            raise UserError(f"{name}.every must be at least 1, not {settings['every']}.")
        if not 0 <= float(settings.get("keep", 0.5)) < 1:
            raise UserError(f"{name}.keep must be at least 0 and below 1, not {settings['keep']}.")

    def conflict(self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]) -> str:
        """A budget needs a compiler that sees the whole model, cheap parts any compiler."""
        if settings.get("how") == "elementwise" and "compile" not in recipe:
            return "what is cheap to recompute is found by the compiler (compile=blocks)"
        whole = recipe.get("compile", {}).get("scope") in ("whole", "loss")
        if settings.get("how") == "budget" and not whole:
            return "a budget is spent by the compiler, over the whole model (compile=whole)"
        return ""

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Let every n-th block recompute, or give the compiler its budget."""
        import torch._dynamo.config
        import torch._functorch.config

        if settings["how"] == "budget":
            torch._functorch.config.activation_memory_budget = float(settings.get("keep", 0.5))
            return
        if settings["how"] == "elementwise":
            torch._functorch.config.ban_recompute_materialized_backward = False
            return
        # Modules record which implementation ran; recomputing them need not record it again.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        every, rng = int(settings.get("every", 1)), bool(settings.get("rng", True))
        blocks = repeated_blocks(parts.model, "Use checkpointing=budget,compile=whole.")
        for index, block in enumerate(blocks):
            recompute(block, index % every == 0, rng)

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Suggested for memory only: it costs time."""
        if context.objective != "memory" or context.run.spec.mode not in TRAINING:
            return []
        all_blocks = Suggestion({"how": "blocks"}, {"memory:activations": 1.0})
        every_other = Suggestion({"how": "blocks", "every": 2}, {"memory:activations": 0.5})
        whole = context.recipe.techniques.get("compile", {}).get("scope") in ("whole", "loss")
        budget = Suggestion({"how": "budget", "keep": 0.5}, {"memory:activations": 0.5})
        cheap = Suggestion({"how": "elementwise"}, {"memory:activations": 0.3})
        compiled = "compile" in context.recipe.techniques
        found = [
            all_blocks,
            every_other,
            *([budget] if whole else []),
            *([cheap] if compiled else []),
        ]
        return [suggestion for suggestion in found if suggestion.settings != current]


def recompute(block: nn.Module, wanted: bool, rng: bool) -> None:
    """Give `block` a forward pass that is repeated in the backward pass where `wanted`.

    It gets a subclass of its own class, the same for all blocks: a function bound to each block
    would be another one for the compiler, and cost a compilation per block. Names of parameters
    stay as they are.
    """
    block.__class__ = _recomputing(type(block))
    block.recomputes = wanted  # type: ignore[assignment]
    block.keeps_rng = rng  # type: ignore[assignment]


@contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """Leave buffers as they are: a second forward pass must not count twice in running statistics.

    All of them: batch norm writes to its statistics without telling (`_version` stays the same).
    """
    kept = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, before in kept:
            buffer.data.copy_(before)  # not seen by autograd, which may have saved the buffer


_SUBCLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `kind`, made once."""
    if kind in _SUBCLASSES:
        return _SUBCLASSES[kind]
    import torch
    from torch.utils.checkpoint import checkpoint

    class Recomputing(kind):  # type: ignore[valid-type, misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            if not self.recomputes or not torch.is_grad_enabled():
                return super().forward(*args, **options)
            kept: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.keeps_rng}
            if not torch.compiler.is_compiling():  # which takes no context of ours
                kept["context_fn"] = lambda: (nullcontext(), _buffers_kept(self))
            return checkpoint(super().forward, *args, **kept, **options)

    Recomputing.__name__ = Recomputing.__qualname__ = kind.__name__
    _SUBCLASSES[kind] = Recomputing
    return Recomputing


TECHNIQUE = Checkpointing()
