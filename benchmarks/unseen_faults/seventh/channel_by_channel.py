"""A depthwise convolution is written as a loop: every channel is sliced off, gets a convolution of
its own, and all results are concatenated again.
A good finding names the many tiny convolutions, and the line of the loop.
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
    "CPU_BATCH": 8,
    "CAUSE": "a depthwise convolution is a Python loop with one convolution per channel",
    "FIX": "nn.Conv2d with groups=channels",
}
SIZE, WIDTH, LAYERS, CLASSES = by_device(64, 24), by_device(256, 48), by_device(6, 4), 10


class Loop(nn.Conv2d):
    def forward(self, x):
        parts = zip(x.split(1, 1), self.weight.split(1), self.bias.split(1), strict=True)
        return torch.cat([F.conv2d(c, w, b, padding=2) for c, w, b in parts], 1)  # guilty


class Net(nn.Module):
    def __init__(self, depthwise):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                depthwise(WIDTH, WIDTH, 5, padding=2, groups=WIDTH),
                nn.Conv2d(WIDTH, 2 * WIDTH, 1),
                nn.GELU(),
                nn.Conv2d(2 * WIDTH, WIDTH, 1),
            )
            for _ in range(LAYERS)
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def build(depthwise):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, 2 * SIZE, 2 * SIZE, device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(batch[0]), batch[1])

    return steplab.UserModel(Net(depthwise), batches, loss, unit="images")


def faulty():
    return build(Loop)


def clean():
    return build(nn.Conv2d)
