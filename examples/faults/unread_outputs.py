"""Outputs for nobody: steplab profile examples/faults/unread_outputs.py:faulty

A compiled loss also returns what it computed on the way, for a panel that is switched off. The
clean twin returns the loss.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "wasted_in_graph"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


class Robust(nn.Module):
    """A line through points, with a loss that forgives outliers."""

    def __init__(self, channels: int, all_of_it: bool) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(-1, 1, channels))
        self.all_of_it = all_of_it

    def forward(self, x_N1: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss and, if asked for, how it came about."""
        expected_NC = x_N1 * self.slope
        residual_NC = x_N1.square() - expected_NC
        weight_NC = 1 / (1 + residual_NC.square())
        loss = (weight_NC * residual_NC.square()).mean()
        return loss, (expected_NC, residual_NC, weight_NC) if self.all_of_it else ()


def made(rows: int, channels: int, all_of_it: bool) -> steplab.UserModel:
    """A compiled model that returns its loss."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, 1)
        while True:
            yield batch

    def loss(model: nn.Module, x_N1: Tensor) -> Tensor:
        found, _panel = model(x_N1)
        return found

    model = Robust(channels, all_of_it)
    model.compile()
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(rows: int = 32768, channels: int = 8) -> steplab.UserModel:
    """Returns everything."""
    return made(rows, channels, all_of_it=True)


def clean(rows: int = 32768, channels: int = 8) -> steplab.UserModel:
    """Returns the loss."""
    return made(rows, channels, all_of_it=False)
