"""Unfused optimizer: steplab profile examples/faults/unfused_optimizer.py:faulty

AdamW updates one tensor at a time, on a model with many weights and few tokens. The clean twin is
fused.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "unfused_optimizer"
where = "cpu"


def made(width: int, layers: int, fused: bool) -> steplab.UserModel:
    """Square layers on four rows."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BD: Tensor) -> Tensor:
        return model(x_BD).abs().mean()

    def optimizer(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=fused, foreach=False)

    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, optimizer=optimizer)


def faulty(width: int = 1024, layers: int = 8) -> steplab.UserModel:
    """One operation after the other, over all weights."""
    return made(width, layers, fused=False)


def clean(width: int = 1024, layers: int = 8) -> steplab.UserModel:
    """One pass over all weights."""
    return made(width, layers, fused=True)
