"""Transposed norms: steplab profile examples/faults/transposed_norm.py:faulty

States of (batch, time, channel) are transposed for BatchNorm1d, which wants the channels second,
and back: its kernels, and the copies around it, go through memory in the other order. The clean
twin gives the norm rows of channels, for the same numbers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "transposed_norm"
where = "cuda"


class Layer(nn.Module):
    """A linear layer, a norm over all steps of all samples, and an activation."""

    def __init__(self, width: int, as_rows: bool) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(width, width, bias=False), nn.BatchNorm1d(width)
        self.as_rows = as_rows

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return (B, T, C)."""
        mixed_BTC = self.mix(x_BTC)
        if self.as_rows:
            return self.norm(mixed_BTC.flatten(0, 1)).view_as(mixed_BTC).relu()
        return self.norm(mixed_BTC.transpose(1, 2)).transpose(1, 2).relu()


def made(width: int, time: int, layers: int, as_rows: bool) -> steplab.UserModel:
    """Batches lie on the device."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batch = torch.randn(size, time, width, device=device, dtype=torch.bfloat16)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTC: Tensor) -> Tensor:
        return (model(x_BTC) - x_BTC).square().mean()

    def optimizer(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    model = nn.Sequential(*(Layer(width, as_rows) for _ in range(layers))).bfloat16()
    return steplab.UserModel(model, batches, loss, time, optimizer=optimizer)


def faulty(width: int = 256, time: int = 16_384, layers: int = 4) -> steplab.UserModel:
    """(B, C, T) for every norm."""
    return made(width, time, layers, as_rows=False)


def clean(width: int = 256, time: int = 16_384, layers: int = 4) -> steplab.UserModel:
    """(B x T, C) for every norm."""
    return made(width, time, layers, as_rows=True)
