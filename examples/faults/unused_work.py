"""Unused work: steplab profile examples/faults/unused_work.py:faulty

Every step computes the correlations of its outputs for a log that nobody reads. The clean twin
leaves them out.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "unused_work"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, logged: bool) -> steplab.UserModel:
    """A stack of layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        out_ND = model(x_ND)
        if logged:
            with torch.no_grad():
                for _ in range(layers):
                    torch.corrcoef(out_ND.T @ out_ND).norm()
        return out_ND.square().mean()

    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 256, rows: int = 128, layers: int = 6) -> steplab.UserModel:
    """A statistic for nobody."""
    return made(width, rows, layers, logged=True)


def clean(width: int = 256, rows: int = 128, layers: int = 6) -> steplab.UserModel:
    """The model only."""
    return made(width, rows, layers, logged=False)
