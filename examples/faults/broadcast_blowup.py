"""A broadcast that blows up: steplab profile examples/faults/broadcast_blowup.py:faulty

Distances to a codebook are sums over a tensor of rows x codes x width. The clean twin takes a
product.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "broadcast_blowup"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, rows: int, layers: int, spread: bool) -> steplab.UserModel:
    """A layer whose outputs go to the nearest of many codes."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        out_ND = model(x_ND)
        if spread:
            return (out_ND[:, None] - codes_CD).square().sum(-1).mean()
        norms_NC = out_ND.square().sum(-1, keepdim=True) + codes_CD.square().sum(-1)
        return (norms_NC - 2 * out_ND @ codes_CD.T).mean()

    codes_CD = torch.randn(layers, width)
    model = nn.Linear(width, width)
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 64, rows: int = 128, layers: int = 128) -> steplab.UserModel:
    """Rows x codes x width."""
    return made(width, rows, layers, spread=True)


def clean(width: int = 64, rows: int = 128, layers: int = 128) -> steplab.UserModel:
    """Rows x codes."""
    return made(width, rows, layers, spread=False)
