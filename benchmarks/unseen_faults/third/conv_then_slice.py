"""Feature maps are halved by taking every second row and column of a convolution's result, so three
of four of its values are computed and dropped.
A good finding names the convolution whose output is mostly unused, and the line that slices it.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 128,
    "CPU_BATCH": 10,
    "CAUSE": "a convolution with stride 1 is followed by [:, :, ::2, ::2]: a quarter of what it computes is used",
    "FIX": "stride=2",
}
SIDE, WIDTH = by_device(128, 64), by_device(64, 24)


class Halve(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class HalveBySlice(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)[:, :, ::2, ::2]))  # guilty


class Net(nn.Module):
    def __init__(self, halve):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.halves = nn.Sequential(
            halve(WIDTH, WIDTH), halve(WIDTH, 2 * WIDTH), halve(2 * WIDTH, 4 * WIDTH)
        )
        self.head = nn.Linear(4 * WIDTH, 10)

    def forward(self, x):
        return self.head(self.halves(F.relu(self.stem(x))).mean((2, 3)))


def build(halve):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, SIDE, SIDE, device=device()),
                torch.randint(10, (size,), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(batch[0]), batch[1])

    return steplab.UserModel(Net(halve), batches, loss, unit="images")


def faulty():
    return build(HalveBySlice)


def clean():
    return build(Halve)
