"""Padded shards: steplab profile examples/faults/padded_shards.py:faulty --ranks 2 --recipe \
parallel=fsdp

Two ranks share stacks of one row, none of whose dimensions is even: one of them gets it all, and
both send and hold as much, over a link of 1 Gbit/s. The clean twin has two rows of half the width.
"""

from collections.abc import Iterator

import torch
from hardware.card import Layer
from hardware.link import slow_down
from torch import Tensor, nn

import steplab

rule = "padded_shards"
where = "cpu"
ranks = 2
recipes = {"faulty": ("parallel=fsdp",), "clean": ("parallel=fsdp",)}
# Between CPUs, fully_shard hides nothing, whatever is sharded.
both = ("exposed_communication", "late_allgather")

ROWS = 1
LAYERS = 4
LAYER_MS = 40.0


class Heads(nn.Module):
    """Weights stacked along their first dimension, as experts or heads are."""

    def __init__(self, stacked: int, width: int, inner: int) -> None:
        super().__init__()
        self.weights_SDF = nn.ParameterList(
            nn.Parameter(torch.randn(stacked, width, inner) / width) for _ in range(LAYERS)
        )
        self.last = Layer(width, LAYER_MS)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for w_SDF in self.weights_SDF:
            z_SNF = x_ND @ w_SDF
            x_ND = x_ND + (z_SNF @ w_SDF.transpose(1, 2)).sum(0)
        return self.last(x_ND)


def made(stacked: int, width: int, inner: int) -> steplab.UserModel:
    """One block."""
    slow_down()

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Heads(stacked, width, inner), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 255) -> steplab.UserModel:
    """One row for two ranks."""
    return made(1, width, 1021)


def clean(width: int = 255) -> steplab.UserModel:
    """Two rows for two ranks."""
    return made(2, width, 511)
