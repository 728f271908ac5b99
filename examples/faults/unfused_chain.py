"""A norm by hand: steplab profile examples/faults/unfused_chain.py:faulty

The norm is written out in seven operators, each of which reads and writes the whole tensor. The
clean twin calls torch's own.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "unfused_chain"
where = "cpu"


class Norm(nn.Module):
    """A layer norm, by hand or not."""

    def __init__(self, width: int, by_hand: bool) -> None:
        super().__init__()
        self.scale_D, self.shift_D = (
            nn.Parameter(torch.ones(width)),
            nn.Parameter(torch.zeros(width)),
        )
        self.by_hand = by_hand

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        if not self.by_hand:
            return F.layer_norm(x_ND, self.scale_D.shape, self.scale_D, self.shift_D)
        centered_ND = x_ND - x_ND.mean(-1, keepdim=True)
        spread_N1 = centered_ND.pow(2).mean(-1, keepdim=True)
        return centered_ND.div(spread_N1.add(1e-5).sqrt()).mul(self.scale_D).add(self.shift_D)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, by_hand: bool) -> steplab.UserModel:
    """A stack of layers and norms."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).square().mean()

    parts = (nn.Sequential(nn.Linear(width, width), Norm(width, by_hand)) for _ in range(layers))
    return steplab.UserModel(nn.Sequential(*parts), batches, loss, rows, optimizer=adamw)


def faulty(width: int = 64, rows: int = 1024, layers: int = 4) -> steplab.UserModel:
    """Op by op."""
    return made(width, rows, layers, by_hand=True)


def clean(width: int = 64, rows: int = 1024, layers: int = 4) -> steplab.UserModel:
    """One operator."""
    return made(width, rows, layers, by_hand=False)
