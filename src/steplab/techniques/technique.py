"""Technique: one change to how a step executes; StepParts: what it may change."""

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

    from steplab.parallel.scheme import Scheme
    from steplab.substitute.backend import SubstitutingBackend


class Stage(IntEnum):
    """When a technique is applied: choices inside the model come before it is compiled."""

    IMPLEMENTATION = 1
    PRECISION = 2
    OPTIMIZER = 3
    MEMORY = 4
    SUBSTITUTION = 5  # knows the precision in which a replacement is proved
    COMPILE = 6
    PARALLEL = 7
    GRAPH = 8
    DATA = 9


@dataclass
class StepParts:
    """The parts of a step before it is assembled. Techniques change them in stage order."""

    model: nn.Module
    device: torch.device
    scaler: torch.amp.GradScaler  # disabled until fp16 asks for it
    tokens: int = 0  # of a micro-batch; 0: nobody knows
    forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    optimizer_options: dict[str, bool] = field(default_factory=dict)
    replace_optimizer: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] | None = None
    wrap_optimizer_step: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    # Around what the forward phase calls: the loss of model and batch; in mode infer, predict.
    wrap_forward: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    # fp32 copies of the parameters that became 16-bit, for the optimizer to update.
    master_weights: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    # Changes the graphs that are compiled, and knows what was changed in modules before.
    substituting: SubstitutingBackend | None = None
    # fp32, tf32, bf16, fp16 or fp8: which peak MFU is measured against.
    matmul_dtype: str = "fp32"
    state_format: str = ""  # of the optimizer's state, where that is rounded: "adam-8bit"
    # Where some layers multiply in fp8, every Linear, network of a mixture and stack of matrices by
    # name: "" for these, for others why they do not.
    fp8_linears: dict[str, str] = field(default_factory=dict)
    settle_steps: int = 0  # steps before the warm-up: compilation, capture
    is_compiled: bool = False  # for the shapes and hooks that the first step has
    graph_warmup: int = 0  # plain steps before the step is captured; 0: no capture
    scheme: Scheme | None = None  # how several ranks share the step; None: one device alone
    batches_ahead: int = 0  # batches fetched while a step runs; 0: none
    loader_workers: int = 0  # processes of the user's DataLoader; 0: as it says itself


class Technique:
    """Base of all techniques. A subclass sets the class variables and `apply`."""

    stage: ClassVar[Stage]
    settings: ClassVar[Any]  # a frozen dataclass; `compile=blocks` sets its first field
    needs: ClassVar[tuple[str, ...]] = ()  # techniques that the recipe must have too
    excludes: ClassVar[tuple[str, ...]] = ()  # techniques that it must not have
    replaces: ClassVar[tuple[str, ...]] = ()  # what a loop of one's own leaves out beside it
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
        return self.complete(read)

    def complete(self, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        """Put the first field in front, with its default where it is not set."""
        first = dataclasses.fields(self.settings)[0].name
        return {first: getattr(self.settings(), first), **settings}

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """Raise a UserError when the settings are not valid, whatever the rest of the recipe."""
        decode(self.settings, dict(settings), name)

    def conflict(self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]) -> str:
        """Say why these settings cannot be part of the recipe; "" when they can.

        For conflicts with settings of other techniques; `needs` and `excludes` know names only.
        """
        return ""

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Change the parts, or raise Unsupported with the reason."""
        raise NotImplementedError

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Return what is worth trying on the step as it is: whole settings, and what they can save.

        `current` is how the technique is set now; empty when the recipe does not have it. The base
        class suggests the technique with its defaults, its savings unknown.
        """
        if current:
            return []
        first = dataclasses.fields(self.settings)[0].name
        return [Suggestion({first: getattr(self.settings(), first)})]

    def remedy(self, run: Run) -> str:
        """Say what to do about a Run of it that failed or is slower; "" when there is no advice."""
        return ""

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Say how what ran differs from what was asked for; "" when it does not. Fails the Run."""
        return ""

    def unverified(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Say why it is unknown whether it ran as asked; "" when it is known. Noted in the Run."""
        return ""
