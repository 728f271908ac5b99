"""Padded shards: steplab profile examples/faults/padded_shards.py:faulty --ranks 2 --recipe \
parallel=fsdp

Two ranks share tensors of three rows: each gets two, of which one is padding. The clean twin has
the same weights with four rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "padded_shards"
where = "cpu"
ranks = 2
recipes = {"faulty": ("parallel=fsdp",), "clean": ("parallel=fsdp",)}

ROWS = 64
HEADS = 8


class Heads(nn.Module):
    """Weights stacked along their first dimension, as experts or heads are."""

    def __init__(self, stacked: int, width: int) -> None:
        super().__init__()
        per_head = HEADS * 12 // stacked
        self.weights_SDF = nn.ParameterList(
            nn.Parameter(torch.randn(stacked, width, per_head * 16) / width) for _ in range(4)
        )

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for w_SDF in self.weights_SDF:
            z_SNF = x_ND @ w_SDF
            x_ND = x_ND + (z_SNF @ w_SDF.transpose(1, 2)).sum(0)
        return x_ND


def made(stacked: int, width: int) -> steplab.UserModel:
    """One block."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Heads(stacked, width), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 256) -> steplab.UserModel:
    """Three rows for two ranks."""
    return made(3, width)


def clean(width: int = 256) -> steplab.UserModel:
    """Four rows for two ranks."""
    return made(4, width)
