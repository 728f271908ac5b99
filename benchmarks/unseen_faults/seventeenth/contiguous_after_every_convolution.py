"""A residual network on photos runs in channels-last, as it should: model and images are in that format. But
a .contiguous(), once needed for a view in a debugging hook, ends every convolution unit: it copies the
states to the other layout, and the next convolution copies them back. It costs little on a CPU.
A good finding names the change of layout (or its copies) and the line of the .contiguous().
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "a .contiguous() after every convolution undoes the channels-last layout",
    "FIX": "leave the .contiguous() out",
    "BATCH": 256,
    "CPU_BATCH": 4,
}
SIDE, WIDTH, KINDS = by_device(224, 88), by_device(32, 16), 1000


def settled(x):
    return x.contiguous()  # guilty


def as_it_is(x):
    return x


class Unit(nn.Module):
    def __init__(self, inside, outside, stride, finish):
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)
        self.norm, self.finish = nn.BatchNorm2d(outside), finish

    def forward(self, x):
        return self.finish(F.relu(self.norm(self.conv(x))))


class Pair(nn.Module):
    def __init__(self, inside, outside, finish):
        super().__init__()
        stride = 1 if inside == outside else 2
        self.first, self.second = (
            Unit(inside, outside, stride, finish),
            Unit(outside, outside, 1, finish),
        )
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(inside, outside, 1, stride=2)

    def forward(self, x):
        return self.skip(x) + self.second(self.first(x))


class PhotoNet(nn.Module):
    def __init__(self, finish):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 7, stride=2, padding=3)
        widths = [
            WIDTH,
            WIDTH,
            WIDTH,
            2 * WIDTH,
            2 * WIDTH,
            4 * WIDTH,
            4 * WIDTH,
            8 * WIDTH,
            8 * WIDTH,
        ]
        self.pairs = nn.Sequential(
            *(Pair(a, b, finish) for a, b in zip(widths, widths[1:], strict=False))
        )
        self.head = nn.Linear(8 * WIDTH, KINDS)

    def forward(self, x):
        return self.head(self.pairs(F.relu(self.stem(x))).mean((2, 3)))


def photos(size):
    def batch():
        images = torch.randn(size, 3, SIDE, SIDE, device=device())
        kinds = torch.randint(KINDS, (size,), device=device())
        return images.contiguous(memory_format=torch.channels_last), kinds

    return in_turn(batch, 4)


def loss(model, batch):
    images, kinds = batch
    with mixed():
        return F.cross_entropy(model(images), kinds)


def build(finish):
    model = PhotoNet(finish).to(memory_format=torch.channels_last)
    return steplab.UserModel(model, photos, loss, optimizer=adamw)


def faulty():
    return build(settled)


def clean():
    return build(as_it_is)
