"""Small buckets: steplab profile examples/faults/small_buckets.py:faulty --ranks 2

Rank 0 sends 256 counters to all, one by one. The clean twin sends them as one tensor.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import steplab

rule = "small_buckets"
where = "cpu"
ranks = 2

ROWS = 2048
COUNTERS = 256


class Counting(nn.Module):
    """Layers, and counters that rank 0 sends to all in every step."""

    def __init__(self, width: int, together: bool) -> None:
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(4)]
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
        self.register_buffer("counters", torch.zeros(COUNTERS, width))
        self.together = together

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        if dist.is_initialized():
            for part in [self.counters] if self.together else self.counters:
                dist.broadcast(part, 0)
        return self.layers(x_ND)


def made(width: int, together: bool) -> steplab.UserModel:
    """Much to compute for few weights."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Counting(width, together), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 128) -> steplab.UserModel:
    """One by one."""
    return made(width, together=False)


def clean(width: int = 128) -> steplab.UserModel:
    """All at once."""
    return made(width, together=True)
