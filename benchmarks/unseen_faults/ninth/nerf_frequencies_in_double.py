"""The frequencies of a NeRF's positional encoding come from numpy as float64, so the angles of all
points, their sines and cosines and the concatenation are in double precision and are cast to float32
right before the network.
A good finding names the float64 work of the encoding (or the cast after it), and the line.
"""

import numpy as np
import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 262144,
    "CPU_BATCH": 24576,
    "CAUSE": "float64 frequencies from numpy make the whole positional encoding run in double precision",
    "FIX": "make the frequencies float32",
}
BANDS, WIDTH = 16, by_device(256, 32)


def frequencies():
    return torch.from_numpy(2.0 ** np.arange(BANDS) * 0.01)  # guilty


def frequencies_in_float():
    return torch.from_numpy(2.0 ** np.arange(BANDS) * 0.01).float()


class Field(nn.Module):
    def __init__(self, bands):
        super().__init__()
        self.register_buffer("bands", bands, persistent=False)
        inputs = 3 * 2 * BANDS
        self.trunk = nn.Sequential(
            nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.color, self.density = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(self, points):
        angles = (points.unsqueeze(-1) * self.bands).flatten(1)
        encoded = torch.cat([angles.sin(), angles.cos()], -1)
        h = self.trunk(encoded.to(torch.float32))
        return torch.sigmoid(self.color(h)), F.softplus(self.density(h))


def build(bands):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.rand(size, 3, device=device()) * 2 - 1,
                torch.rand(size, 3, device=device()),
                torch.rand(size, 1, device=device()),
            )
        )

    def loss(model, batch):
        points, color, density = batch
        with mixed():
            guess, sigma = model(points)
            return F.mse_loss(guess, color) + 0.1 * F.mse_loss(sigma, density)

    return steplab.UserModel(Field(bands()), batches, loss, unit="points")


def faulty():
    return build(frequencies)


def clean():
    return build(frequencies_in_float)
