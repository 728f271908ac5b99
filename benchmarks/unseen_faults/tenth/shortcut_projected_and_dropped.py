"""A hand-written ResNet computes a projected shortcut in every bottleneck, although only the first
one of a stage changes the shape; all others add the input itself and drop the projection.
A good finding names the projection whose result is not used, and its line.
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
    "CPU_BATCH": 8,
    "CAUSE": "the projection of the shortcut runs in every block, and most blocks drop its result",
    "FIX": "project only in the blocks that change the number of channels",
}
SIZE, CLASSES, BLOCKS = by_device(32, 12), 10, 8
WIDTH = by_device(512, 128)


def conv(inside, outside, kernel):
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outside),
    )


class Bottleneck(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        thin = outside // 4
        self.changes = inside != outside
        self.reduce, self.conv = conv(inside, thin, 1), conv(thin, thin, 3)
        self.expand, self.downsample = conv(thin, outside, 1), conv(inside, outside, 1)

    def body(self, x):
        return self.expand(F.relu(self.conv(F.relu(self.reduce(x)))))


class Always(Bottleneck):
    def forward(self, x):
        y = self.body(x)
        projected = self.downsample(x)  # guilty
        shortcut = projected if self.changes else x
        return F.relu(y + shortcut)


class WhereNeeded(Bottleneck):
    def forward(self, x):
        y = self.body(x)
        shortcut = self.downsample(x) if self.changes else x
        return F.relu(y + shortcut)


class ResNet(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH // 4, 4, 4)
        widths = [WIDTH // 4] + [WIDTH] * BLOCKS
        self.blocks = nn.Sequential(*(block(widths[i], widths[i + 1]) for i in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def build(block):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, 4 * SIZE, 4 * SIZE, device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        images, labels = batch
        with mixed():
            return F.cross_entropy(model(images), labels)

    return steplab.UserModel(ResNet(block), batches, loss, unit="images")


def faulty():
    return build(Always)


def clean():
    return build(WhereNeeded)
