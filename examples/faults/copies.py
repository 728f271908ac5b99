"""Copies: steplab profile examples/faults/copies.py:faulty

Every layer transposes its activations and back, with two copies, just to scale the channels. The
clean twin scales them without a transpose.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "copies"
where = "cpu"


class Scale(nn.Module):
    """Mixes channels, then scales them."""

    def __init__(self, width: int, transposed: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.scale_D = nn.Parameter(torch.ones(width))
        self.transposed = transposed

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        mixed_BTD = self.mix(x_BTD)
        if not self.transposed:
            return mixed_BTD * self.scale_D
        channels_BDT = mixed_BTD.transpose(1, 2).contiguous()
        scaled_BDT = channels_BDT * self.scale_D[:, None]
        return scaled_BDT.transpose(1, 2).contiguous()


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, context: int, layers: int, transposed: bool) -> steplab.UserModel:
    """A stack of such layers."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size, context, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).abs().mean()

    model = nn.Sequential(*(Scale(width, transposed) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, context, optimizer=adamw)


def faulty(width: int = 64, context: int = 2048, layers: int = 6) -> steplab.UserModel:
    """Two copies a layer, and two more in backward."""
    return made(width, context, layers, transposed=True)


def clean(width: int = 64, context: int = 2048, layers: int = 6) -> steplab.UserModel:
    """No copies."""
    return made(width, context, layers, transposed=False)
