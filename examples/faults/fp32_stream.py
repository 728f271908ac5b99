"""Fp32 stream: steplab profile examples/faults/fp32_stream.py:faulty

A norm in a bf16 model returns fp32, so that all sums after it are fp32. The clean twin casts back.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "fp32_stream"
where = "cpu"


class Block(nn.Module):
    """A norm and two layers, beside the stream."""

    def __init__(self, width: int, narrow: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.narrow = narrow

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        wide_ND = x_ND.float()
        norm_ND = wide_ND * torch.rsqrt(wide_ND.square().mean(-1, keepdim=True) + 1e-6)
        x_ND = norm_ND.to(torch.bfloat16) if self.narrow else norm_ND
        return x_ND + self.down(self.up(x_ND.to(torch.bfloat16)).relu())


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, narrow: bool) -> steplab.UserModel:
    """Many rows of few columns: moving them takes longer than multiplying."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width).bfloat16()
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).float().abs().mean()

    model = nn.Sequential(*(Block(width, narrow) for _ in range(4))).bfloat16()
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 64, rows: int = 2048) -> steplab.UserModel:
    """Widens."""
    return made(width, rows, narrow=False)


def clean(width: int = 64, rows: int = 2048) -> steplab.UserModel:
    """Casts back."""
    return made(width, rows, narrow=True)
