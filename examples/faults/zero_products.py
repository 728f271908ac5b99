"""Products with zeros: steplab profile examples/faults/zero_products.py:faulty

Rows are picked by a product with a one-hot matrix. The clean twin picks them by index.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "zero_products"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


class Picked(nn.Module):
    """Shuffles the rows between layers."""

    def __init__(self, width: int, layers: int, onehot: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.onehot = onehot

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        order_N = torch.randperm(len(x_ND))
        if self.onehot:
            order_NN = nn.functional.one_hot(order_N, len(x_ND)).to(x_ND.dtype)
        for layer in self.layers:
            x_ND = layer(order_NN @ x_ND if self.onehot else x_ND.index_select(0, order_N))
        return x_ND


def made(width: int, rows: int, layers: int, onehot: bool) -> steplab.UserModel:
    """A stack of layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).square().mean()

    model = Picked(width, layers, onehot)
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 128, rows: int = 256, layers: int = 4) -> steplab.UserModel:
    """By a product."""
    return made(width, rows, layers, onehot=True)


def clean(width: int = 128, rows: int = 256, layers: int = 4) -> steplab.UserModel:
    """By index."""
    return made(width, rows, layers, onehot=False)
