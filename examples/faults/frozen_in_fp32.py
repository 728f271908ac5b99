"""Frozen weights in fp32: steplab profile examples/faults/frozen_in_fp32.py:faulty

Adapters are trained beside frozen layers under autocast, which makes a bf16 copy of each frozen
weight for the products and keeps it until the backward. The clean twin has them in bf16.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "frozen_in_fp32"
where = "cpu"
RANK = 4


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update of what is trained, unless another is asked for: it is no part of this."""
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(weights, **(implementation or {"fused": True}))


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False, dtype=dtype).requires_grad_(False)
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, width, bias=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Add both."""
        return self.base(x_ND) + self.up(self.down(x_ND))


def made(width: int, dtype: torch.dtype) -> steplab.UserModel:
    """Eight layers."""

    def batches(size: int) -> Iterator[Tensor]:
        while True:
            yield torch.randn(16 * size, width)

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        with torch.autocast(x_ND.device.type, torch.bfloat16):
            return model(x_ND).square().mean()

    model = nn.Sequential(*(Adapted(width, dtype) for _ in range(8)))
    return steplab.UserModel(model, batches, loss, 16, optimizer=adamw)


def faulty(width: int = 512) -> steplab.UserModel:
    """As they were loaded."""
    return made(width, torch.float32)


def clean(width: int = 512) -> steplab.UserModel:
    """As the products read them."""
    return made(width, torch.bfloat16)
