"""The Dice loss of a segmenter multiplies the probabilities by F.one_hot of the labels, which is
int64: twice as large as the probabilities themselves, and kept for the backward.
A good finding names the int64 tensor of pixels x classes, and the line of one_hot.
"""

import steplab
import torch
from torch import nn
from torch.nn import functional as F

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 32,
    "CPU_BATCH": 4,
    "CAUSE": "the one-hot labels are int64, 8 bytes per class and pixel, until the backward",
    "FIX": "compare the labels with the class numbers: a bool mask of one byte each",
}
SIZE, CLASSES, WIDTH = by_device(256, 96), by_device(150, 96), by_device(64, 16)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, CLASSES, 1),
        )

    def forward(self, x):
        return self.body(x)


def wide_mask(labels):
    return F.one_hot(labels, CLASSES).permute(0, 3, 1, 2)  # guilty


def narrow_mask(labels):
    classes = torch.arange(CLASSES, device=labels.device)
    return labels[:, None] == classes[:, None, None]


def build(mask_of):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.rand(size, 3, SIZE, SIZE, device=device()),
                torch.randint(CLASSES, (size, SIZE, SIZE), device=device()),
            ),
            count=4,
        )

    def loss(model, batch):
        images, labels = batch
        with mixed():
            logits = model(images)
        chances = logits.float().softmax(dim=1)
        mask = mask_of(labels)
        common = (chances * mask).sum((0, 2, 3))
        dice = (2 * common + 1) / (chances.sum((0, 2, 3)) + mask.sum((0, 2, 3)) + 1)
        return 1 - dice.mean()

    return steplab.UserModel(Segmenter(), batches, loss, unit="images")


def faulty():
    return build(wide_mask)


def clean():
    return build(narrow_mask)
