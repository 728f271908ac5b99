"""A network for sensor series normalizes its features with BatchNorm1d, which wants the channels in
the second dimension. So the states are transposed to (batch, channel, time) and back around every
norm: each norm, and the linear layer after it, reads memory with large strides or copies it. Flat rows
of (batch x time, channel) need no transpose, and give the same numbers.
A good finding names the transposed layout of the norms (or the copies it causes) and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 512,
    "CPU_BATCH": 32,
    "CAUSE": "states are transposed to (batch, channel, time) and back around every BatchNorm1d, which works on strided memory and causes copies",
    "FIX": "normalize flat rows: norm(x.flatten(0, 1)).view_as(x)",
}
TIME, SENSORS, WIDTH, LAYERS = by_device(1024, 128), 16, by_device(384, 128), by_device(6, 3)
CLASSES = 12


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)


class Transposed(Layer):
    def forward(self, x):
        x = self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)  # guilty
        return F.relu(x)


class Flat(Layer):
    def forward(self, x):
        x = self.norm(self.linear(x).flatten(0, 1)).view_as(x)
        return F.relu(x)


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed = nn.Linear(SENSORS, WIDTH)
        self.layers = nn.Sequential(*[layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.layers(self.embed(x)).mean(1))


def build(layer):
    my_turn()

    def batch(size):
        series = torch.randn(size, TIME, SENSORS, device=device())
        return series, torch.randint(CLASSES, (size,), device=device())

    def loss(model, pair):
        with mixed():
            return F.cross_entropy(model(pair[0]), pair[1])

    return steplab.UserModel(
        Model(layer), lambda size: in_turn(lambda: batch(size), 4), loss, unit="series"
    )


def faulty():
    return build(Transposed)


def clean():
    return build(Flat)
