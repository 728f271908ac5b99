"""The coupling layers of a normalizing flow take the even and the odd columns with tensors of
indices instead of slices: every gather copies, and its backward adds numbers one by one into zeros.
A good finding names the index operators with their backward, and the line.
"""

import math

import steplab
import torch
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 65_536,
    "CPU_BATCH": 3072,
    "CAUSE": "even and odd columns are taken by index tensors, whose backward is a scatter",
    "FIX": "slice them: x[:, 0::2] and x[:, 1::2]",
}
COLUMNS, HIDDEN, LAYERS = 64, by_device(128, 32), by_device(12, 6)


class Coupling(nn.Module):
    """Scales and shifts the odd columns by a function of the even ones, then swaps them."""

    def __init__(self):
        super().__init__()
        half = COLUMNS // 2
        self.register_buffer("even", torch.arange(0, COLUMNS, 2))
        self.register_buffer("odd", torch.arange(1, COLUMNS, 2))
        self.net = nn.Sequential(nn.Linear(half, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * half))

    def forward(self, x):
        a, b = self.halves(x)
        scale, shift = self.net(a).chunk(2, dim=1)
        scale = torch.tanh(scale)
        b = b * torch.exp(scale) + shift
        return torch.stack([b, a], dim=2).flatten(1), scale.sum(dim=1)


class Indexed(Coupling):
    def halves(self, x):
        return x[:, self.even], x[:, self.odd]  # guilty


class Sliced(Coupling):
    def halves(self, x):
        return x[:, 0::2], x[:, 1::2]


class Flow(nn.Module):
    def __init__(self, coupling):
        super().__init__()
        self.layers = nn.ModuleList(coupling() for _ in range(LAYERS))

    def forward(self, x):
        volume = 0.0
        for layer in self.layers:
            x, logdet = layer(x)
            volume = volume + logdet
        return 0.5 * (x.float().square() + math.log(2 * math.pi)).sum(dim=1) - volume


def build(coupling):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, COLUMNS, device=device()))

    def loss(model, rows):
        with mixed():
            return model(rows).mean()

    return steplab.UserModel(Flow(coupling), batches, loss, unit="rows")


def faulty():
    return build(Indexed)


def clean():
    return build(Sliced)
