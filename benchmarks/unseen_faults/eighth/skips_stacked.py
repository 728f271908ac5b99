"""A WaveNet collects the skip outputs of all its layers in a list, stacks them and sums them up:
all of them are in memory twice at the same time, and they are wider than everything else. A running
sum needs none of them for the backward, so each is freed at once.
A good finding names the list of skip outputs or the stack and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 8,
    "CPU_BATCH": 2,
    "CAUSE": "the skip outputs of all layers are kept in a list and stacked before their sum, so each is in memory twice",
    "FIX": "add each skip output to a running sum",
}
TIME, WIDTH, SKIP = by_device(16000, 1000), by_device(64, 16), by_device(256, 64)
LAYERS, LEVELS = by_device(20, 8), 256


class Layer(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.shift = dilation
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=dilation)
        self.skip, self.out = nn.Conv1d(WIDTH, SKIP, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x):
        a, b = self.conv(F.pad(x, (self.shift, 0))).chunk(2, 1)
        y = torch.tanh(a) * torch.sigmoid(b)
        return x + self.out(y), self.skip(y)


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LEVELS, WIDTH)
        self.layers = nn.ModuleList(Layer(2 ** (i % 10)) for i in range(LAYERS))
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv1d(SKIP, SKIP, 1), nn.ReLU(), nn.Conv1d(SKIP, LEVELS, 1)
        )

    def forward(self, levels):
        return self.head(self.skips(self.embed(levels).transpose(1, 2)))


class Stacked(WaveNet):
    def skips(self, x):
        kept = []
        for layer in self.layers:
            x, skip = layer(x)
            kept.append(skip)
        return torch.stack(kept).sum(0)  # guilty


class Running(WaveNet):
    def skips(self, x):
        total = 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return total


def build(kind):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randint(LEVELS, (size, TIME + 1), device=device()))

    def loss(model, levels):
        with mixed():
            return F.cross_entropy(model(levels[:, :-1]), levels[:, 1:])

    return steplab.UserModel(kind(), batches, loss, unit="clips")


def faulty():
    return build(Stacked)


def clean():
    return build(Running)
