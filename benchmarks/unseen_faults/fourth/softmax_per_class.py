"""The Dice loss of a segmentation goes through the classes, and takes the softmax of all logits
again for each of them; every one is kept for the backward pass.
A good finding names the softmax that is computed and kept once per class, and its line.
"""

import steplab
import torch
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 4,
    "CAUSE": "the softmax of all logits is computed and kept for the backward pass once per class",
    "FIX": "one softmax before the loop, and sums over all classes at once",
}
SIDE, WIDTH, CLASSES = by_device(256, 64), by_device(64, 24), by_device(32, 20)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1),
            nn.ReLU(),
        )
        self.up = nn.ConvTranspose2d(2 * WIDTH, CLASSES, 2, stride=2)

    def forward(self, x):
        return self.up(self.down(x))


def dice_by_class(logits, labels):
    total = 0.0
    for c in range(CLASSES):
        chance = torch.softmax(logits, 1)[:, c]  # guilty
        target = labels == c
        both = (chance * target).sum((1, 2))
        total = total + (2 * both + 1) / (chance.sum((1, 2)) + target.sum((1, 2)) + 1)
    return 1 - total.mean() / CLASSES


def dice(logits, labels):
    chance = torch.softmax(logits, 1).flatten(2)
    labels = labels.flatten(1)[:, None]
    right = chance.gather(1, labels)[:, 0]
    zeros = chance.new_zeros(len(chance), CLASSES)
    both = zeros.scatter_add(1, labels[:, 0], right)
    sizes = zeros.scatter_add(1, labels[:, 0], torch.ones_like(right))
    return 1 - ((2 * both + 1) / (chance.sum(2) + sizes + 1)).mean()


def build(dice):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, SIDE, SIDE, device=device()).contiguous(
                    memory_format=torch.channels_last
                ),
                torch.randint(CLASSES, (size, SIDE, SIDE), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            logits = model(batch[0])
        return dice(logits.float(), batch[1])

    model = Segmenter().to(device(), memory_format=torch.channels_last)
    return steplab.UserModel(model, batches, loss, unit="images")


def faulty():
    return build(dice_by_class)


def clean():
    return build(dice)
