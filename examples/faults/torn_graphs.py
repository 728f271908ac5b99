"""Compiled piece by piece: steplab profile examples/faults/torn_graphs.py:faulty

Four small functions are compiled one by one and called in a row. The clean twin compiles the
function that calls them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "torn_graphs"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def scaled(x: Tensor) -> Tensor:
    """Divide every row by its length."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def shifted(x: Tensor, shift: Tensor) -> Tensor:
    """Add the same to every row."""
    return x * (1 + shift) + shift


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Let a part of it through."""
    return x * (gate > 0)


def mixed(x: Tensor, y: Tensor) -> Tensor:
    """Take the mean of both."""
    return 0.5 * x + 0.5 * y


class Pieces(nn.Module):
    """A layer, and elementwise work behind it."""

    def __init__(self, width: int, torn: bool) -> None:
        super().__init__()
        self.mix, self.shift = nn.Linear(8, width), nn.Parameter(torch.zeros(width))
        compiled = torch.compile if torn else lambda function: function
        self.scaled, self.shifted, self.gated, self.mixed = (
            compiled(function) for function in (scaled, shifted, gated, mixed)
        )
        self.compiled = self.together if torn else torch.compile(self.together)

    def together(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        y_ND = self.shifted(self.scaled(x_ND), self.shift)
        return self.mixed(self.gated(y_ND, self.shift), x_ND)

    def forward(self, x_N8: Tensor) -> Tensor:
        """Return (N, D)."""
        return self.compiled(self.mix(x_N8))


def made(width: int, rows: int, torn: bool) -> steplab.UserModel:
    """One layer."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, 8)
        while True:
            yield batch

    def loss(model: nn.Module, x_N8: Tensor) -> Tensor:
        return model(x_N8).square().mean()

    return steplab.UserModel(Pieces(width, torn), batches, loss, rows, optimizer=adamw)


def faulty(width: int = 512, rows: int = 512) -> steplab.UserModel:
    """Four graphs."""
    return made(width, rows, torn=True)


def clean(width: int = 512, rows: int = 512) -> steplab.UserModel:
    """One graph."""
    return made(width, rows, torn=False)
