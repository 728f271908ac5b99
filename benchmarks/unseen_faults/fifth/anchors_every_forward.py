"""A detector makes the anchor boxes of all its levels in Python, box by box, in every forward,
although all images have the same size.
A good finding names the time in Python in which the anchors are made, or the tensor made of a list,
and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32,
    "CPU_BATCH": 20,
    "CAUSE": "the anchors, which never change, are made box by box in Python in every forward",
    "FIX": "make them once and keep them in a buffer",
}
SIDE, CHANNELS, SHAPES = by_device(512, 64), by_device(128, 32), (0.5, 1.0, 2.0)
STRIDES = by_device(8, 2), by_device(16, 4), by_device(32, 8)


def anchors():
    boxes = []
    for stride in STRIDES:
        for y in range(SIDE // stride):
            for x in range(SIDE // stride):
                for shape in SHAPES:
                    wide, high = 2 * stride * shape**0.5, 2 * stride / shape**0.5
                    boxes.append([(x + 0.5) * stride, (y + 0.5) * stride, wide, high])
    return torch.tensor(boxes, device=device()) / SIDE


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, STRIDES[0], 1)
        self.downs = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1) for _ in STRIDES[1:])
        self.head = nn.Conv2d(CHANNELS, 4 * len(SHAPES), 3, 1, 1)

    def offsets(self, images):
        levels = [F.relu(self.first(images))]
        for down in self.downs:
            levels.append(F.relu(down(levels[-1])))
        boxes = [
            self.head(level).permute(0, 2, 3, 1).reshape(len(images), -1, 4) for level in levels
        ]
        return torch.cat(boxes, 1)


class Rebuilt(Detector):
    def forward(self, images):
        return self.offsets(images) + anchors()  # guilty


class Kept(Detector):
    def __init__(self):
        super().__init__()
        self.register_buffer("anchors", anchors(), persistent=False)

    def forward(self, images):
        return self.offsets(images) + self.anchors


def build(detector):
    my_turn()
    boxes = len(anchors())

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, SIDE, SIDE, device=device()).contiguous(
                    memory_format=torch.channels_last
                ),
                torch.rand(size, boxes, 4, device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.smooth_l1_loss(model(batch[0]), batch[1])

    model = detector().to(memory_format=torch.channels_last)
    return steplab.UserModel(model, batches, loss, unit="images")


def faulty():
    return build(Rebuilt)


def clean():
    return build(Kept)
