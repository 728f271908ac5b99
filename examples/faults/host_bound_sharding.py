"""Host-bound sharding: steplab profile examples/faults/host_bound_sharding.py:faulty --ranks 2 \
--recipe parallel=fsdp

Sixteen narrow blocks are gathered and reduced one by one, which costs more Python than they
compute. The clean twin has the same weights in one block.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "host_bound_sharding"
where = "cpu"
ranks = 2
recipes = {"faulty": ("parallel=fsdp",), "clean": ("parallel=fsdp",)}
# Between CPUs, fully_shard hides nothing, whatever is sharded.
both = ("exposed_communication", "late_allgather")

ROWS = 16
BLOCKS = 16


class Blocks(nn.Module):
    """Layers as blocks of their own, or as one."""

    def __init__(self, width: int, apart: bool) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(layers if apart else [nn.Sequential(*layers)])

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for block in self.blocks:
            x_ND = block(x_ND)
        return x_ND


def made(width: int, apart: bool) -> steplab.UserModel:
    """Little to compute."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Blocks(width, apart), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 64) -> steplab.UserModel:
    """Sixteen blocks."""
    return made(width, apart=True)


def clean(width: int = 64) -> steplab.UserModel:
    """One block."""
    return made(width, apart=False)
