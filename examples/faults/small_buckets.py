"""Small buckets: steplab profile examples/faults/small_buckets.py:faulty --ranks 2

The ranks send each other 128 counters in turns, one by one. The clean twin sends them together.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from hardware.card import Layer
from torch import Tensor, nn

import steplab

rule = "small_buckets"
where = "cpu"
ranks = 2

ROWS = 16
LAYERS = 4
LAYER_MS = 15.0
COUNTERS = 128


class Counting(nn.Module):
    """Layers, and counters that all ranks get to know in every step."""

    def __init__(self, width: int, together: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width, LAYER_MS) for _ in range(LAYERS)))
        self.register_buffer("counters", torch.zeros(COUNTERS, width))
        self.together = together

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        if dist.is_initialized():
            for number, part in enumerate([self.counters] if self.together else self.counters):
                dist.broadcast(part, number % dist.get_world_size())
        return self.layers(x_ND)


def made(width: int, together: bool) -> steplab.UserModel:
    """Few weights, so that their gradients are sent quickly."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Counting(width, together), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 32) -> steplab.UserModel:
    """One by one."""
    return made(width, together=False)


def clean(width: int = 32) -> steplab.UserModel:
    """All at once."""
    return made(width, together=True)
