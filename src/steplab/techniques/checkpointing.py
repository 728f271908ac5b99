"""Activations recomputed in the backward pass instead of kept: memory for time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from steplab.core import Run, Setting, Settings
from steplab.core.errors import UserError
from steplab.techniques.compile import repeated_blocks
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique
from steplab.trace.categories import PRODUCT_OPS

if TYPE_CHECKING:
    from torch import nn
    from torch._ops import OpOverload

TRAINING = ("forward+backward", "full")
# Ops with products inside, by a word in their names; and ours that only pass over their inputs.
HEAVY_WORDS = ("attention", "rnn", "lstm", "gru")
OWN_OPS, OWN_PASSES = "steplab::", ("norm", "rotary")
DROPOUT_ARGUMENTS = ("dropout_p", "dropout")
# Of what a block of a transformer keeps, so much lies between products: 8 of 19 widths of gpt's.
BETWEEN_PRODUCTS = 0.4


@dataclass(frozen=True)
class CheckpointingSettings:
    """`blocks`: every n-th repeated block. `budget`: the compiler chooses what to recompute.

    `selective`: as `blocks`, but results of products and attention are kept, so that only what is
    cheap is computed twice. `elementwise`: the same idea for compiled code: the compiler recomputes
    norms' outputs, gates and casts that products of the backward read. By itself it does so only
    inside kernels that are there anyway.
    """

    how: Literal["blocks", "selective", "budget", "elementwise"] = "blocks"
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
        """A budget and cheap parts need a compiler; `selective` is for steps without one."""
        how, compiled = settings.get("how"), "compile" in recipe
        if how == "elementwise" and not compiled:
            return "what is cheap to recompute is found by the compiler (compile=blocks)"
        if how == "budget" and not compiled:
            return "a budget is spent by the compiler (compile=blocks, whole or loss)"
        if how == "selective" and compiled:
            return (
                "selective is for blocks that run op by op; checkpointing=elementwise is its like "
                "for compiled ones"
            )
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
            recompute(block, index % every == 0, rng, settings["how"] == "selective")

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Suggested for memory only: it costs time."""
        if context.objective != "memory" or context.run.spec.mode not in TRAINING:
            return []
        offers: list[tuple[dict[str, Setting], float]] = [
            ({"how": "blocks"}, 1.0),
            ({"how": "blocks", "every": 2}, 0.5),
        ]
        if "compile" in context.recipe.techniques:
            offers.append(({"how": "budget", "keep": 0.5}, 0.5))
            offers.append(({"how": "elementwise"}, 0.3))
        else:
            offers.append(({"how": "selective"}, BETWEEN_PRODUCTS))
        found = [Suggestion(how, {"memory:activations": share}) for how, share in offers]
        return [suggestion for suggestion in found if suggestion.settings != current]

    def remedy(self, run: Run) -> str:
        """Results that are kept must not be changed in place."""
        how = run.spec.recipe.techniques.get("checkpointing", {}).get("how")
        changed = run.status == "failed" and "mutated" in run.reason
        is_kept = how == "selective" and changed
        return "checkpointing=blocks, which keeps no results" if is_kept else ""


def recompute(block: nn.Module, wanted: bool, rng: bool, selective: bool = False) -> None:
    """Give `block` a forward pass that is repeated in the backward pass where `wanted`.

    With `selective`, products and attention are not: their results are kept.

    It gets a subclass of its own class, the same for all blocks: a function bound to each block
    would be another one for the compiler, and cost a compilation per block. Names of parameters
    stay as they are.
    """
    block.__class__ = _recomputing(type(block))
    block.recomputes = wanted  # type: ignore[assignment]
    block.keeps_rng = rng  # type: ignore[assignment]
    block.keeps_products = selective  # type: ignore[assignment]


def is_kept(op: OpOverload, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether `selective` keeps the results of an operator: it multiplies, and draws nothing.

    One that drops at random is computed again: were it skipped, what draws after it would not get
    the numbers that it had.
    """
    import torch

    name, schema = op._schema.name, op._schema
    own = name.startswith(OWN_OPS) and not any(word in name for word in OWN_PASSES)
    heavy = name in PRODUCT_OPS or name == "aten::convolution" or own
    if schema.is_mutable or not (heavy or any(word in name for word in HEAVY_WORDS)):
        return False
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return True
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    shares = [{**given, **options}.get(name, 0.0) for name in DROPOUT_ARGUMENTS]
    return not any(shares)


def _contexts(block: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what the first forward pass of a block runs in, and what the second does."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    second = _both(_buffers_kept(block), _host_generators_kept(block))
    if not block.keeps_products:
        return nullcontext(), second

    def policy(context: Any, op: OpOverload, *args: Any, **options: Any) -> CheckpointPolicy:
        keep = is_kept(op, args, options)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    return first, _both(second, again)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter both; what the outer one computes is not seen by the inner one."""
    with outer, inner:
        yield


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


def _host_generators_kept(block: Any) -> AbstractContextManager[None]:
    """Let Python and numpy draw what they draw in the first forward pass, which is about to begin.

    torch sees to its own generators alone. A layer that is left out now and then would be there in
    one pass and not in the other.
    """
    import numpy as np

    if not block.keeps_rng:
        return nullcontext()
    first = random.getstate(), np.random.get_state()

    @contextmanager
    def again() -> Iterator[None]:
        before = random.getstate(), np.random.get_state()
        random.setstate(first[0])
        np.random.set_state(first[1])
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])

    return again()


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
                kept["context_fn"] = lambda: _contexts(self)
            return checkpoint(super().forward, *args, **kept, **options)

    Recomputing.__name__ = Recomputing.__qualname__ = kind.__name__
    _SUBCLASSES[kind] = Recomputing
    return Recomputing


TECHNIQUE = Checkpointing()
