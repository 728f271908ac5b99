"""A Fourier neural operator learns the solution of a flow. Each spectral layer casts its input to
double "for the Fourier transform", so the transform, the product with the modes, and the transform
back, forward and backward, run in float64 before the result is cast down again.
A good finding names the double precision of the spectral layer, or the cast that causes it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the spectral layer casts its input to double: transforms and product run in float64",
    "FIX": "leave out the cast to double",
}
BATCH, SIDE, WIDTH, MODES, LAYERS = by_device(32, 8), by_device(128, 48), by_device(32, 12), 16, 3


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, MODES, 2) / WIDTH)
        self.local = nn.Conv2d(WIDTH, WIDTH, 1)

    def spectrum(self, x):
        return torch.fft.rfft2(x)

    def forward(self, x):
        modes = self.spectrum(x)[:, :, :MODES, :MODES]
        weight = torch.view_as_complex(self.weight).to(modes.dtype)
        modes = torch.einsum("bixy,ioxy->boxy", modes, weight)
        modes = F.pad(modes, (0, SIDE // 2 + 1 - MODES, 0, SIDE - MODES))
        return torch.fft.irfft2(modes, s=(SIDE, SIDE)).to(x.dtype) + self.local(x)


class DoubleSpectral(Spectral):
    def spectrum(self, x):
        return torch.fft.rfft2(x.double())  # guilty


class Operator(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.inside, self.outside = nn.Conv2d(3, WIDTH, 1), nn.Conv2d(WIDTH, 1, 1)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x):
        x = self.inside(x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.outside(x)


def build(layer):
    model = Operator(layer).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()),
            torch.randn(BATCH, 1, SIDE, SIDE, device=device()),
        )
    )

    def step():
        x, y = next(data)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(DoubleSpectral)


def clean():
    return build(Spectral)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
