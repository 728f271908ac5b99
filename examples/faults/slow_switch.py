"""A switch for debugging: steplab profile examples/faults/slow_switch.py:faulty

Anomaly mode was left on: every operator keeps a Python stack, and every gradient is looked at. The
clean twin computes the same without it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "slow_switch"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, debugging: bool) -> steplab.UserModel:
    """A stack of layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        torch.autograd.set_detect_anomaly(debugging)
        return model(x_ND).square().mean()

    made = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    model = nn.Sequential(*made)
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 64, rows: int = 16, layers: int = 24) -> steplab.UserModel:
    """Left on."""
    return made(width, rows, layers, debugging=True)


def clean(width: int = 64, rows: int = 16, layers: int = 24) -> steplab.UserModel:
    """Off."""
    return made(width, rows, layers, debugging=False)
