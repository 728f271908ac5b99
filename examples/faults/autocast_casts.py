"""Casts: steplab profile examples/faults/autocast_casts.py:faulty

The residual stream is bf16, the norms' weights are fp32, and a gate is computed "in fp32 to be
safe": every layer casts four times and its norm is not fused. The clean twin keeps one dtype.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

rule = "autocast_casts"
where = "cpu"


class Layer(nn.Module):
    """A norm and a gate."""

    def __init__(self, width: int, mixed: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate_D = nn.Parameter(torch.ones(width))
        self.mixed = mixed

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        if not self.mixed:
            return x_ND + F.relu(self.norm(x_ND) * self.gate_D)
        x_ND = x_ND.bfloat16()
        normed_ND = self.norm(x_ND).bfloat16()
        gated_ND = F.relu(normed_ND.float() * self.gate_D).bfloat16()
        return (x_ND + gated_ND).float()


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, mixed: bool) -> steplab.UserModel:
    """A stack of such layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    model = nn.Sequential(*(Layer(width, mixed) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 512, rows: int = 512, layers: int = 6) -> steplab.UserModel:
    """Back and forth."""
    return made(width, rows, layers, mixed=True)


def clean(width: int = 512, rows: int = 512, layers: int = 6) -> steplab.UserModel:
    """One dtype."""
    return made(width, rows, layers, mixed=False)
