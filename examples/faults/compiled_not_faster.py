"""Compiled and not faster: steplab profile examples/faults/compiled_not_faster.py:faulty

A debugging backend was left on: the model is traced and guarded, but nothing is fused. Measure it
first without and then with compile, in the same store. The clean twin is not compiled.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "compiled_not_faster"
where = "cpu"
recipes = {"faulty": ("plain", "compile=whole,compile.backend=aot_eager")}


class Residual(nn.Module):
    """A narrow layer: less to compute than to call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        return x_ND + torch.relu(self.mix(self.norm(x_ND)))


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def faulty(width: int = 64, layers: int = 24) -> steplab.UserModel:
    """A stack of narrow layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * 8, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    model = nn.Sequential(*(Residual(width) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, optimizer=adamw)


def clean(width: int = 64, layers: int = 24) -> steplab.UserModel:
    """The same, as it is."""
    return faulty(width, layers)
