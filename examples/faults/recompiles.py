"""Recompiles: steplab profile examples/faults/recompiles.py:faulty

Every batch has another length, and the model is compiled for static shapes. The clean twin pads to
one length.
"""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor, nn

import steplab

rule = "recompiles"
where = "cpu"
both = ("compiled_not_faster",)  # neither is fused: with Inductor every length takes seconds
# torch's profiler cannot name the code that a compiler runs and frees while stacks are recorded.
flags = {"faulty": ("--no-detail",), "clean": ("--no-detail",)}

SHORTEST, LONGEST = 32, 128


class Stack(nn.Module):
    """Modules in a row. torch.compile looks into user code, but not into nn.Sequential's own."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        for part in self.parts:
            x_BTD = part(x_BTD)
        return x_BTD


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, padded: bool) -> steplab.UserModel:
    """A small compiled network on sequences of growing length."""
    torch._dynamo.config.recompile_limit = LONGEST

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, LONGEST, width)
        for number in count():
            yield batch if padded else batch[:, : SHORTEST + number % (LONGEST - SHORTEST)]

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).abs().mean()

    model = Stack(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    model.compile(dynamic=False, backend="aot_eager")
    return steplab.UserModel(model, batches, loss, LONGEST, optimizer=adamw)


def faulty(width: int = 64) -> steplab.UserModel:
    """A new graph at every step."""
    return made(width, padded=False)


def clean(width: int = 64) -> steplab.UserModel:
    """One graph."""
    return made(width, padded=True)
