"""Desync: steplab profile examples/faults/desync.py:faulty --ranks 2

Two statistics are exchanged in two groups. Rank 1 begins them in the other order, which gloo
survives, since nobody waits before both have begun; one group of NCCL would hang. The clean twin
begins them in one order.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from hardware.card import Layer
from torch import Tensor, nn

import steplab

rule = "desync"
where = "cpu"
ranks = 2

ROWS = 16
LAYERS = 4
LAYER_MS = 15.0


class Exchanging(nn.Module):
    """Layers, a broadcast and a gathering."""

    def __init__(self, width: int, ordered: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(width, LAYER_MS) for _ in range(LAYERS)))
        self.ordered = ordered
        self.other: dist.ProcessGroup | None = None

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        if not dist.is_initialized():
            return self.layers(x_ND)
        self.other = self.other or dist.new_group()
        one = torch.ones(8)
        all_ = [torch.empty(8) for _ in range(dist.get_world_size())]
        begin = [
            lambda: dist.broadcast(one, 0, async_op=True),
            lambda: dist.all_gather(all_, torch.ones(8), group=self.other, async_op=True),
        ]
        if not self.ordered and dist.get_rank() == 1:
            begin.reverse()
        begun = [each() for each in begin]
        out_ND = self.layers(x_ND)
        for work in begun:
            work.wait()
        return out_ND


def made(width: int, ordered: bool) -> steplab.UserModel:
    """Few weights, so that their gradients are sent quickly."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Exchanging(width, ordered), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 32) -> steplab.UserModel:
    """Each rank in its own order."""
    return made(width, ordered=False)


def clean(width: int = 32) -> steplab.UserModel:
    """All in one order."""
    return made(width, ordered=True)
