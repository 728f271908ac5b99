"""Uneven exchange: steplab profile examples/faults/uneven_exchange.py:faulty --ranks 2

Rank 0 sends fifteen of sixteen rows of its table to rank 1, which sends one of sixteen back. In the
clean twin both send half.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

import steplab

rule = "uneven_exchange"
where = "cpu"
ranks = 2

ROWS = 2048
ELEMENTS = 16 << 20  # of all messages together


class Exchanging(nn.Module):
    """Layers, and an exchange of rows between two ranks."""

    def __init__(self, width: int, share: float) -> None:
        super().__init__()
        layers = [nn.Linear(width, width) for _ in range(4)]
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
        self.share = share
        self.rows: list[Tensor] = []  # to receive and to send, made once

    def exchange(self) -> None:
        """Send and receive; a rank keeps nothing of its own."""
        mine = self.share if dist.get_rank() == 0 else 1 - self.share
        sizes = int(ELEMENTS * (1 - mine)), int(ELEMENTS * mine)  # received, sent
        if not self.rows:
            self.rows = [torch.zeros(size) for size in sizes]
        order = (lambda size: [0, size]) if dist.get_rank() == 0 else (lambda size: [size, 0])
        dist.all_to_all_single(*self.rows, *map(order, sizes))

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        if dist.is_initialized():
            self.exchange()
        return self.layers(x_ND)


def made(width: int, share: float) -> steplab.UserModel:
    """Much to compute for few weights."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Exchanging(width, share), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 128) -> steplab.UserModel:
    """Nearly all in one direction."""
    return made(width, 15 / 16)


def clean(width: int = 128) -> steplab.UserModel:
    """Half in each."""
    return made(width, 1 / 2)
