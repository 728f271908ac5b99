"""A convnet blurs before it drops every second pixel. The blur is the same 3x3 kernel in every
channel, but it is written as an ordinary convolution from all channels to all, zero off the
diagonal.
A good finding names the blur, which multiplies by zeros, and its line.
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
    "CAUSE": "a blur of single channels is a convolution of all channels with all, nearly all weights zero",
    "FIX": "groups=channels",
}
SIDE, CHANNELS, CLASSES = by_device(64, 32), by_device(128, 48), 10


class Blur(nn.Module):
    def __init__(self, channels):
        super().__init__()
        line, self.channels = torch.tensor([0.25, 0.5, 0.25]), channels
        self.register_buffer("kernel", self.weights(line[:, None] * line), persistent=False)


class Full(Blur):
    def weights(self, kernel):
        return torch.eye(self.channels)[:, :, None, None] * kernel

    def forward(self, x):
        return F.conv2d(x, self.kernel, stride=2, padding=1)  # guilty


class Depthwise(Blur):
    def weights(self, kernel):
        return kernel.repeat(self.channels, 1, 1, 1)

    def forward(self, x):
        return F.conv2d(x, self.kernel, stride=2, padding=1, groups=self.channels)


def network(blur):
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1),
        nn.ReLU(),
        blur(CHANNELS),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1),
        nn.ReLU(),
        blur(2 * CHANNELS),
        nn.Conv2d(2 * CHANNELS, 2 * CHANNELS, 1),
        nn.ReLU(),
        blur(2 * CHANNELS),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * CHANNELS, CLASSES),
    ).to(memory_format=torch.channels_last)


def build(blur):
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

    return steplab.UserModel(network(blur), batches, loss, unit="images")


def faulty():
    return build(Full)


def clean():
    return build(Depthwise)
