"""Kept memory: steplab profile examples/faults/kept_memory.py:faulty

The model keeps the hidden states of all steps to look at them later. The clean twin keeps their
means.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "kept_memory"
where = "cpu"
memory = "kept_bytes"  # what the twins differ in: the peak grows with every step


class Watched(nn.Module):
    """Two layers that remember what was between them."""

    def __init__(self, width: int, whole: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.whole = whole
        self.seen: list[Tensor] = []

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        hidden_ND = self.first(x_ND).relu()
        self.seen.append(hidden_ND if self.whole else hidden_ND.detach().mean())
        return self.last(hidden_ND)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, whole: bool) -> steplab.UserModel:
    """More rows than weights, so that activations hold most of the memory."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    return steplab.UserModel(Watched(width, whole), batches, loss, rows, optimizer=adamw)


def faulty(width: int = 256, rows: int = 1024) -> steplab.UserModel:
    """Keeps the states, and with them their graphs."""
    return made(width, rows, whole=True)


def clean(width: int = 256, rows: int = 1024) -> steplab.UserModel:
    """Keeps a number each."""
    return made(width, rows, whole=False)
