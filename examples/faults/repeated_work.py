"""Repeated work: steplab profile examples/faults/repeated_work.py:faulty

Every layer is checkpointed although memory is plentiful: backward computes the forward again. The
clean twin calls the layers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import steplab

rule = "repeated_work"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


class Deep(nn.Module):
    """Layers that may be computed twice."""

    def __init__(self, width: int, layers: int, thrifty: bool) -> None:
        super().__init__()
        made = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        self.layers = nn.ModuleList(made)
        self.thrifty = thrifty

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        for layer in self.layers:
            x_ND = checkpoint(layer, x_ND, use_reentrant=False) if self.thrifty else layer(x_ND)
        return x_ND


def made(width: int, rows: int, layers: int, thrifty: bool) -> steplab.UserModel:
    """A stack of layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).square().mean()

    model = Deep(width, layers, thrifty)
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 256, rows: int = 128, layers: int = 6) -> steplab.UserModel:
    """The forward twice."""
    return made(width, rows, layers, thrifty=True)


def clean(width: int = 256, rows: int = 128, layers: int = 6) -> steplab.UserModel:
    """The forward once."""
    return made(width, rows, layers, thrifty=False)
