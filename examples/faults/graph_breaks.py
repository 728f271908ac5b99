"""Graph breaks: steplab profile examples/faults/graph_breaks.py:faulty

Each layer branches in Python on a value it has just computed, so torch.compile breaks its graph
there. The clean twin uses torch.where.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "graph_breaks"
where = "cpu"


class Gate(nn.Module):
    """Some elementwise work and a decision."""

    def __init__(self, width: int, in_python: bool) -> None:
        super().__init__()
        self.weight_D = nn.Parameter(torch.ones(width))
        self.in_python = in_python

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        bent_ND = torch.tanh(x_ND * self.weight_D) + 0.5 * x_ND
        if self.in_python:
            if bent_ND.mean() > 1e3:
                bent_ND = bent_ND * 0.5
        else:
            bent_ND = torch.where(bent_ND.mean() > 1e3, bent_ND * 0.5, bent_ND)
        return torch.sigmoid(bent_ND) * x_ND


class Stack(nn.Module):
    """Modules in a row. torch.compile looks into user code, but not into nn.Sequential's own."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for part in self.parts:
            x_ND = part(x_ND)
        return x_ND


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, in_python: bool) -> steplab.UserModel:
    """A compiled stack of gates."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    model = Stack(*(Gate(width, in_python) for _ in range(layers)))
    model.compile()
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 64, rows: int = 64, layers: int = 6) -> steplab.UserModel:
    """One break per layer."""
    return made(width, rows, layers, in_python=True)


def clean(width: int = 64, rows: int = 64, layers: int = 6) -> steplab.UserModel:
    """One graph."""
    return made(width, rows, layers, in_python=False)
