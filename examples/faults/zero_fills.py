"""Zero fills: steplab profile examples/faults/zero_fills.py:faulty

A loop takes slices x[:, t], and the gradient of each is a tensor of zeros as large as x. The clean
twin unbinds x, whose gradient is put together once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "zero_fills"
where = "cpu"


class Weighted(nn.Module):
    """A sum over time with a weight for each step."""

    def __init__(self, time: int, slices: bool) -> None:
        super().__init__()
        self.weight_T = nn.Parameter(torch.randn(time))
        self.slices = slices

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, D)."""
        steps = range(x_BTD.shape[1])
        parts = [x_BTD[:, t] for t in steps] if self.slices else x_BTD.unbind(1)
        weights = self.weight_T.unbind()
        return torch.stack([w * part_BD for w, part_BD in zip(weights, parts, strict=True)]).sum(0)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(time: int, width: int, slices: bool) -> steplab.UserModel:
    """A layer before the sum, so that its input has a gradient."""
    model = nn.Sequential(nn.Linear(width, width), Weighted(time, slices))

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(2 * size, time, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).abs().mean()

    return steplab.UserModel(model, batches, loss, time, optimizer=adamw)


def faulty(time: int = 32, width: int = 512) -> steplab.UserModel:
    """By slices."""
    return made(time, width, slices=True)


def clean(time: int = 32, width: int = 512) -> steplab.UserModel:
    """Unbound."""
    return made(time, width, slices=False)
