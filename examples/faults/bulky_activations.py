"""Copies instead of broadcasting: steplab profile examples/faults/bulky_activations.py:faulty

Every layer of a denoiser scales its channels by what a speaker's vector says. The faulty twin
repeats the scales over time before it multiplies, and each copy is kept until the backward.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "bulky_activations"
where = "cpu"
TIME, SPEAKER = 1024, 32


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update, unless another is asked for: it is no part of this."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


class Layer(nn.Module):
    """A convolution whose result is scaled channel by channel."""

    def __init__(self, width: int, repeats: bool) -> None:
        super().__init__()
        self.repeats = repeats
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.scales = nn.Linear(SPEAKER, width)

    def forward(self, x_BCT: Tensor, speaker_BS: Tensor) -> Tensor:
        """Add the scaled result."""
        scale_BC1 = self.scales(speaker_BS)[..., None]
        if self.repeats:
            scale_BC1 = scale_BC1.repeat(1, 1, x_BCT.shape[-1])
        return x_BCT + self.convolution(x_BCT) * scale_BC1


class Denoiser(nn.Module):
    """Four layers."""

    def __init__(self, width: int, repeats: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, repeats) for _ in range(4))

    def forward(self, x_BCT: Tensor, speaker_BS: Tensor) -> Tensor:
        """Apply them."""
        for layer in self.layers:
            x_BCT = layer(x_BCT, speaker_BS)
        return x_BCT


def made(width: int, repeats: bool) -> steplab.UserModel:
    """A step on noise."""

    def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(size, width, TIME), torch.randn(size, SPEAKER)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(*batch).square().mean()

    return steplab.UserModel(
        Denoiser(width, repeats), batches, loss, TIME, unit="samples", optimizer=adamw
    )


def faulty(width: int = 32) -> steplab.UserModel:
    """Repeats the scales over time."""
    return made(width, repeats=True)


def clean(width: int = 32) -> steplab.UserModel:
    """Lets them broadcast."""
    return made(width, repeats=False)
