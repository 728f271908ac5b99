"""Heads one by one: steplab profile examples/faults/heads_in_a_loop.py:faulty

Every head is a module of its own with a narrow projection, and a loop runs one after the other. The
clean twin projects for all heads at once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "small_operators"
where = "cpu"


class Heads(nn.Module):
    """A gated mean over time in every head."""

    def __init__(self, width: int, heads: int, apart: bool) -> None:
        super().__init__()
        size = width // heads if apart else width
        self.heads = nn.ModuleList(nn.Linear(width, 2 * size) for _ in range(width // size))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        halves = [head(x_BTD).chunk(2, -1) for head in self.heads]
        return x_BTD + torch.cat([torch.sigmoid(gate) * value for gate, value in halves], -1)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, time: int, heads: int, apart: bool) -> steplab.UserModel:
    """Layers of heads, and a wide one."""
    layers = nn.ModuleList(Heads(width, heads, apart) for _ in range(4))
    model = nn.Sequential(*layers, nn.Linear(width, 4 * width))

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, time, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).square().mean()

    return steplab.UserModel(model, batches, loss, time, optimizer=adamw)


def faulty(width: int = 256, time: int = 64, heads: int = 64) -> steplab.UserModel:
    """One after the other."""
    return made(width, time, heads, apart=True)


def clean(width: int = 256, time: int = 64, heads: int = 64) -> steplab.UserModel:
    """All at once."""
    return made(width, time, heads, apart=False)
