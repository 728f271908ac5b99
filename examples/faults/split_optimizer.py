"""An optimizer in pieces: steplab profile examples/faults/split_optimizer.py:faulty

Every weight has a parameter group of its own, so that a fused optimizer updates one tensor at a
time. The clean twin has one group.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "split_optimizer"
where = "cpu"


def made(width: int, rows: int, layers: int, apart: bool) -> steplab.UserModel:
    """A stack of small layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).square().mean()

    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def optimizer(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        groups = [{"params": [weight]} for weight in model.parameters()]
        chosen = implementation or {"fused": True}
        return torch.optim.AdamW(groups if apart else model.parameters(), **chosen)

    return steplab.UserModel(model, batches, loss, rows, optimizer=optimizer)


def faulty(width: int = 64, rows: int = 64, layers: int = 64) -> steplab.UserModel:
    """A group per weight."""
    return made(width, rows, layers, apart=True)


def clean(width: int = 64, rows: int = 64, layers: int = 64) -> steplab.UserModel:
    """One group."""
    return made(width, rows, layers, apart=False)
