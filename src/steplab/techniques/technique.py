"""Technique: one change to how a step executes, and StepParts, what it may change."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from steplab.codec import decode, read_word, type_hints
from steplab.errors import UserError, did_you_mean
from steplab.record import Run
from steplab.spec.recipe import Setting

if TYPE_CHECKING:
    import torch
    from torch import nn


class Stage(IntEnum):
    """When a technique is applied: choices inside the model come before it is compiled."""

    IMPLEMENTATION = 1
    PRECISION = 2
    OPTIMIZER = 3
    COMPILE = 4


@dataclass
class StepParts:
    """The parts of a step before it is put together. Techniques change them in stage order."""

    model: nn.Module
    device: torch.device
    scaler: torch.amp.GradScaler  # disabled until fp16 asks for it
    forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    optimizer_options: dict[str, bool] = field(default_factory=dict)
    wrap_optimizer_step: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    matmul_dtype: str = "fp32"  # fp32, tf32, bf16 or fp16: which peak MFU is measured against
    settle_steps: int = 0  # steps that must run before warm-up can begin (compilation)


class Technique:
    """Base of all techniques. A subclass sets the class variables and `apply`."""

    summary: ClassVar[str]
    stage: ClassVar[Stage]
    settings: ClassVar[Any]  # a frozen dataclass; its first field is the one named in short form
    conflicts: ClassVar[tuple[str, ...]] = ()

    def read(self, words: Mapping[str, str], name: str) -> dict[str, Setting]:
        """Turn `{"": "blocks", "mode": "default"}` into typed settings, or raise a UserError."""
        fields = [f.name for f in dataclasses.fields(self.settings)]
        hints = type_hints(self.settings)
        read: dict[str, Setting] = {}
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

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Change the parts, or raise Unsupported with the reason."""
        raise NotImplementedError

    def deviation(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Say how what ran differs from what was asked for; "" when it does not."""
        return ""

    def doubt(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Say why it cannot be told whether it ran as asked; "" when it can."""
        return ""
