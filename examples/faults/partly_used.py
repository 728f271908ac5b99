"""Results that are dropped: steplab profile examples/faults/partly_used.py:faulty

The head runs at every position, and only the last one is taken. The clean twin takes it first.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "partly_used"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


class Last(nn.Module):
    """Says something of a sequence at its end."""

    def __init__(self, width: int, everywhere: bool) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(width, width), nn.Linear(width, 8 * width)
        self.everywhere = everywhere

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, 8 D)."""
        x_BTD = self.mix(x_BTD).relu()
        return self.head(x_BTD)[:, -1] if self.everywhere else self.head(x_BTD[:, -1])


def made(width: int, time: int, everywhere: bool) -> steplab.UserModel:
    """A layer and a head."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, time, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).square().mean()

    return steplab.UserModel(Last(width, everywhere), batches, loss, time, optimizer=adamw)


def faulty(width: int = 256, time: int = 128) -> steplab.UserModel:
    """At every position."""
    return made(width, time, everywhere=True)


def clean(width: int = 256, time: int = 128) -> steplab.UserModel:
    """At the last one."""
    return made(width, time, everywhere=False)
