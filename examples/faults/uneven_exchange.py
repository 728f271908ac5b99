"""Uneven exchange: steplab profile examples/faults/uneven_exchange.py:faulty --ranks 2

The ranks exchange 10 MiB of rows while the first layers compute. Rank 0 sends fifteen of sixteen
rows, which takes 79 ms over a link of 1 Gbit/s, longer than those layers. In the clean twin both
send half, in 42 ms.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from hardware.card import Layer
from hardware.link import slow_down
from torch import Tensor, nn

import steplab

rule = "uneven_exchange"
where = "cpu"
ranks = 2

ROWS = 16
LAYERS = 2  # before the rows are needed, and after
LAYER_MS = 28.0
# Gloo sends one message's rows of one rank before those of the other; of several, both at a time.
MESSAGES = 5
ELEMENTS = 1 << 19  # of a message, from both ranks together


class Exchanging(nn.Module):
    """Layers, and an exchange of rows between two ranks."""

    def __init__(self, width: int, share: float) -> None:
        super().__init__()
        self.before, self.after = (
            nn.Sequential(*(Layer(width, LAYER_MS) for _ in range(LAYERS))) for _ in range(2)
        )
        self.share = share
        self.rows: list[Tensor] = []  # to receive and to send, made once

    def exchange(self) -> list[dist.Work]:
        """Begin to send and to receive; a rank keeps nothing of its own."""
        if not dist.is_initialized():
            return []
        mine = self.share if dist.get_rank() == 0 else 1 - self.share
        sizes = int(ELEMENTS * (1 - mine)), int(ELEMENTS * mine)  # received, sent
        if not self.rows:
            self.rows = [torch.zeros(size) for size in sizes]
        order = (lambda size: [0, size]) if dist.get_rank() == 0 else (lambda size: [size, 0])
        call = partial(dist.all_to_all_single, *self.rows, *map(order, sizes), async_op=True)
        return [call() for _ in range(MESSAGES)]

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        coming = self.exchange()
        x_ND = self.before(x_ND)
        for work in coming:
            work.wait()
        return self.after(x_ND)


def made(width: int, share: float) -> steplab.UserModel:
    """Few weights, so that their gradients are sent quickly."""
    slow_down()

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Exchanging(width, share), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 32) -> steplab.UserModel:
    """Nearly all in one direction."""
    return made(width, 15 / 16)


def clean(width: int = 32) -> steplab.UserModel:
    """Half in each."""
    return made(width, 1 / 2)
