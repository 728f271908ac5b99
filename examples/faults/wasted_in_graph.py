"""A loss of weight zero, compiled: steplab profile examples/faults/wasted_in_graph.py:faulty

The compiled model still computes a second loss, whose weight is zero. The clean twin leaves it out.
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


class TwoLosses(nn.Module):
    """An encoder with two heads."""

    def __init__(self, width: int, always: bool) -> None:
        super().__init__()
        self.encode = nn.Linear(width, width)
        self.head, self.decode = nn.Linear(width, 8), nn.Linear(width, width)
        self.always, self.weight = always, 0.0

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return the loss."""
        h_ND = torch.relu(self.encode(x_ND))
        loss = self.head(h_ND).square().mean()
        if self.always or self.weight:
            loss = loss + self.weight * (self.decode(h_ND) - x_ND).square().mean()
        return loss


def made(width: int, rows: int, always: bool) -> steplab.UserModel:
    """A compiled model that returns its loss."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND)

    model = TwoLosses(width, always)
    model.compile()
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 512, rows: int = 64) -> steplab.UserModel:
    """Computes what is multiplied by zero."""
    return made(width, rows, always=True)


def clean(width: int = 512, rows: int = 64) -> steplab.UserModel:
    """Computes one loss."""
    return made(width, rows, always=False)
