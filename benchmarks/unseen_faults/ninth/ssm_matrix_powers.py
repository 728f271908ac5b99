"""The convolution kernel of a state-space layer is C A^t B for every time t. Each power of A is
computed from scratch by matrix_power in a Python loop over the times.
A good finding names the loop of matrix powers (its many small products), and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 16,
    "CAUSE": "every power of the state matrix is computed from scratch in a Python loop over time",
    "FIX": "double the known part of A^t B with one product at a time",
}
TIME, WIDTH = by_device(512, 128), by_device(512, 128)
STATE, INPUTS, LAYERS = by_device(64, 16), 8, 2


class StateSpace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(0.97 * torch.linalg.qr(torch.randn(STATE, STATE))[0])
        self.b = nn.Parameter(torch.randn(STATE, WIDTH) / STATE**0.5)
        self.c = nn.Parameter(torch.randn(STATE, WIDTH) / STATE**0.5)
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def states(self):
        """Return A^t B for all times: (time, state, width)."""
        powers = [torch.linalg.matrix_power(self.a, t) for t in range(TIME)]  # guilty
        return torch.stack(powers) @ self.b

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            kernel = (self.states() * self.c).sum(1)
            y = torch.fft.rfft(self.norm(x).float(), 2 * TIME, 1)
            y = torch.fft.irfft(y * torch.fft.rfft(kernel, 2 * TIME, 0), 2 * TIME, 1)[:, :TIME]
        return x + F.gelu(self.mix(y))


class Doubling(StateSpace):
    def states(self):
        known, power = self.b.unsqueeze(0), self.a
        while len(known) < TIME:
            known = torch.cat([known, power @ known])
            power = power @ power
        return known


class Series(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.head = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.Sequential(*(layer() for _ in range(LAYERS)))

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))[..., 0]


def build(layer):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, TIME, INPUTS, device=device()),
                torch.randn(size, TIME, device=device()),
            )
        )

    def loss(model, batch):
        x, y = batch
        with mixed():
            return F.mse_loss(model(x), y)

    return steplab.UserModel(Series(layer), batches, loss, unit="series")


def faulty():
    return build(StateSpace)


def clean():
    return build(Doubling)
