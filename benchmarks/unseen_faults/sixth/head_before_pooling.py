"""A classifier of images runs its head, a 1x1 convolution to a thousand classes, on every pixel of the
last features and averages the result, instead of averaging the features first.
A good finding names the head as by far the largest product or tensor of the step, and its line.
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
    "CPU_BATCH": 14,
    "CAUSE": "the head of 1000 classes runs on every pixel before the average over the pixels",
    "FIX": "average the features, then run the head once per image",
}
SIDE, WIDTH, CLASSES = by_device(128, 48), by_device(128, 32), 1000


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * WIDTH, 4 * WIDTH, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Conv2d(4 * WIDTH, CLASSES, 1)


class HeadFirst(Classifier):
    def forward(self, x):
        return self.head(self.body(x)).mean((2, 3))  # guilty


class PoolFirst(Classifier):
    def forward(self, x):
        return self.head(self.body(x).mean((2, 3), keepdim=True)).flatten(1)


def build(classifier):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, SIDE, SIDE, device=device()).contiguous(
                    memory_format=torch.channels_last
                ),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(batch[0]), batch[1])

    model = classifier().to(memory_format=torch.channels_last)
    return steplab.UserModel(model, batches, loss, unit="images")


def faulty():
    return build(HeadFirst)


def clean():
    return build(PoolFirst)
