"""Complex transforms: steplab profile examples/faults/complex_transforms.py:faulty

A long convolution of real signals multiplies their spectra. It transforms them as complex numbers
and drops the imaginary part at the end. The clean twin keeps half of each spectrum.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "complex_transforms"
where = "cpu"


class Convolution(nn.Module):
    """A filter as long as the signal for every channel."""

    def __init__(self, width: int, length: int, real: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.filter_DT = nn.Parameter(torch.randn(width, length) / length**0.5)
        self.real = real

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map (batch, time, width) to the same."""
        x_BDT, length = self.mix(x_BTD).mT, x_BTD.shape[1]
        around = real_product if self.real else complex_product
        return x_BTD + around(x_BDT, self.filter_DT, 2 * length)[..., :length].mT


def complex_product(x_BDT: Tensor, filter_DT: Tensor, n: int) -> Tensor:
    """Multiply whole spectra."""
    return torch.fft.ifft(torch.fft.fft(x_BDT, n=n) * torch.fft.fft(filter_DT, n=n)).real


def real_product(x_BDT: Tensor, filter_DT: Tensor, n: int) -> Tensor:
    """Multiply the half of the spectra that says everything."""
    return torch.fft.irfft(torch.fft.rfft(x_BDT, n=n) * torch.fft.rfft(filter_DT, n=n), n=n)


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, length: int, layers: int, real: bool) -> steplab.UserModel:
    """Signals that are filtered a few times."""

    def batches(size: int) -> Iterator[Tensor]:
        while True:
            yield torch.randn(size, length, width)

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).square().mean()

    model = nn.Sequential(*(Convolution(width, length, real) for _ in range(layers)))
    return steplab.UserModel(model, batches, loss, length, optimizer=adamw)


def faulty(width: int = 32, length: int = 1024, layers: int = 3) -> steplab.UserModel:
    """Transforms of complex numbers."""
    return made(width, length, layers, real=False)


def clean(width: int = 32, length: int = 1024, layers: int = 3) -> steplab.UserModel:
    """Transforms of real numbers."""
    return made(width, length, layers, real=True)
