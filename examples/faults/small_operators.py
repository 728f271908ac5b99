"""Small operators: steplab profile examples/faults/small_operators.py:faulty

A running mean over time, one step after the other in Python: two operators for each of 256 steps.
The clean twin multiplies by the matrix of the weights, once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "small_operators"
where = "cpu"

KEPT = 0.9  # of the mean so far


class RunningMean(nn.Module):
    """m_t = 0.9 m_(t-1) + 0.1 x_t."""

    def __init__(self, time: int, loop: bool) -> None:
        super().__init__()
        self.loop = loop
        age_TT = torch.arange(time)[:, None] - torch.arange(time)
        self.register_buffer("weight_TT", (1 - KEPT) * KEPT ** age_TT.clamp(min=0) * (age_TT >= 0))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        if not self.loop:
            return self.weight_TT @ x_BTD
        mean_BD = torch.zeros_like(x_BTD[:, 0])
        means = []
        for x_BD in x_BTD.unbind(1):
            mean_BD = KEPT * mean_BD + (1 - KEPT) * x_BD
            means.append(mean_BD)
        return torch.stack(means, 1)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(time: int, width: int, loop: bool) -> steplab.UserModel:
    """A layer before and one after the mean."""
    model = nn.Sequential(nn.Linear(width, width), RunningMean(time, loop), nn.Linear(width, width))

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, time, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).abs().mean()

    return steplab.UserModel(model, batches, loss, time, optimizer=adamw)


def faulty(time: int = 256, width: int = 64) -> steplab.UserModel:
    """Step by step."""
    return made(time, width, loop=True)


def clean(time: int = 256, width: int = 64) -> steplab.UserModel:
    """All steps at once."""
    return made(time, width, loop=False)
