"""Technique: one change to how a step executes, and StepParts, what it may change."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from steplab.core import Run, Setting, Settings
from steplab.core.codec import decode, read_word, type_hints
from steplab.core.errors import UserError, did_you_mean
from steplab.techniques.context import StepContext, Suggestion

if TYPE_CHECKING:
    import torch
    from torch import nn


class Stage(IntEnum):
    """When a technique is applied: choices inside the model come before it is compiled."""

    IMPLEMENTATION = 1
    PRECISION = 2
    OPTIMIZER = 3
    MEMORY = 4
    COMPILE = 5
    GRAPH = 6
    DATA = 7


@dataclass
class StepParts:
    """The parts of a step before it is put together. Techniques change them in stage order."""

    model: nn.Module
    device: torch.device
    scaler: torch.amp.GradScaler  # disabled until fp16 asks for it
    forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    optimizer_options: dict[str, bool] = field(default_factory=dict)
    replace_optimizer: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] | None = None
    wrap_optimizer_step: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    # The fp32 weights of parameters that were made 16-bit; an optimizer has to keep them.
    master_weights: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    matmul_dtype: str = "fp32"  # fp32, tf32, bf16 or fp16: which peak MFU is measured against
    settle_steps: int = 0  # steps that must run before warm-up can begin (compilation, capture)
    graph_warmup: int = 0  # plain steps before the whole step is captured; 0: it is not
    batches_ahead: int = 0  # fetched while a step runs; 0: between two steps


class Technique:
    """Base of all techniques. A subclass sets the class variables and `apply`."""

    summary: ClassVar[str]
    stage: ClassVar[Stage]
    settings: ClassVar[Any]  # a frozen dataclass; its first field is the one named in short form
    needs: ClassVar[tuple[str, ...]] = ()  # techniques that the recipe must have too
    conflicts: ClassVar[tuple[str, ...]] = ()  # techniques that it must not have
    slow_start: ClassVar[bool] = False  # its first step takes far longer than the others

    def read(
        self, words: Mapping[str, str], name: str, base: Mapping[str, Setting] | None = None
    ) -> dict[str, Setting]:
        """Turn `{"": "blocks", "mode": "default"}` into typed settings, or raise a UserError.

        What the words do not set is taken from `base`.
        """
        fields = [f.name for f in dataclasses.fields(self.settings)]
        hints = type_hints(self.settings)
        read: dict[str, Setting] = dict(base or {})
        for key, word in words.items():
            if key and key not in fields:
                raise UserError(f"{name} has no setting {key!r}.", did_you_mean(key, fields))
            key = key or fields[0]
            read[key] = read_word(hints[key], word, f"{name}.{key}")
        return self.complete(read, name)

    def complete(self, settings: Mapping[str, Setting], name: str) -> dict[str, Setting]:
        """Check settings and put the first field in front, with its default if it is not set."""
        self.check(settings, name)
        first = dataclasses.fields(self.settings)[0].name
        return {first: getattr(self.settings(), first), **settings}

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """Raise a UserError when the settings, as data, are not valid."""
        decode(self.settings, dict(settings), name)

    def conflict(self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]) -> str:
        """Say which settings of other techniques of the recipe rule these out; "" when none do.

        For what `needs` and `conflicts`, which know names only, cannot tell.
        """
        return ""

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Change the parts, or raise Unsupported with the reason."""
        raise NotImplementedError

    def suggest(self, context: StepContext, own: Settings) -> list[Suggestion]:
        """Return what is worth trying on the step as it is: whole settings, and what they relieve.

        `own` is how the technique is set now; empty when the recipe has it not. By default it is
        suggested as it comes, and what it can gain is not known.
        """
        if own:
            return []
        first = dataclasses.fields(self.settings)[0].name
        return [Suggestion({first: getattr(self.settings(), first)})]

    def remedy(self, run: Run) -> str:
        """Say what to do about a Run of it that failed, or is slower; "" when it knows nothing."""
        return ""

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Say how what ran differs from what was asked for; "" when it does not."""
        return ""

    def unverified(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Say why it cannot be told whether it ran as asked; "" when it can."""
        return ""
