"""A forecaster of river levels works on the cosine spectrum of its windows: each layer transforms the
series, scales the frequencies channel by channel, and transforms back. The matrix of cosines is
made with numpy and so has 64 bits; the products complained about unequal dtypes, and the states are
cast up for them since. Nothing needs that precision.
A good finding names the products in float64 and one of the two lines (or the buffer that makes them so).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the matrix of the cosine transform is float64, so the layers transform in double precision",
    "FIX": "store the matrix of cosines as float32",
}
BATCH, TIME, GAUGES = by_device(32, 16), by_device(1024, 192), 16
WIDTH, LAYERS, HORIZON = by_device(512, 64), by_device(6, 3), 12


def cosines(length):
    places, frequencies = np.arange(length) + 0.5, np.arange(length)
    basis = np.cos(np.pi / length * frequencies[:, None] * places) * (2.0 / length) ** 0.5
    basis[0] *= 0.5**0.5
    return torch.from_numpy(basis)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.filter = nn.Parameter(torch.randn(TIME, WIDTH) * 0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def mix(self, x, basis):
        spectrum = basis @ x.to(basis.dtype)  # guilty
        return (basis.T @ (spectrum * self.filter)).to(x.dtype)

    def forward(self, x, basis):
        x = x + self.mix(self.norm1(x), basis)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Rivers(nn.Module):
    def __init__(self, basis):
        super().__init__()
        self.register_buffer("basis", basis)
        self.start = nn.Linear(GAUGES, WIDTH)
        self.layers = nn.ModuleList(Spectral() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, HORIZON)

    def forward(self, levels):
        x = self.start(levels)
        for layer in self.layers:
            x = layer(x, self.basis)
        return self.head(x.mean(1))


def build(basis):
    model = Rivers(basis).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, TIME, GAUGES, device=device()),
            torch.randn(BATCH, HORIZON, device=device()),
        )
    )

    def step():
        levels, future = next(data)
        with mixed():
            loss = F.mse_loss(model(levels).float(), future)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(cosines(TIME))


def clean():
    return build(cosines(TIME).float())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
