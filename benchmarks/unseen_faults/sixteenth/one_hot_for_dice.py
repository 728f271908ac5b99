"""Organs are segmented in CT slices, with cross-entropy plus a soft Dice loss. For the Dice term the
labels become a one-hot volume of 64-bit integers and then one of floats, each as large as the
probabilities or twice as large, only to pick one probability per pixel.
A good finding names the one-hot labels (int64, then float, of pixels times classes) of the Dice term as
what fills the memory, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the Dice loss makes one-hot labels of int64, and floats of them, for all pixels and classes",
    "FIX": "gather the true class's probability and add it up per class (scatter_add), without one-hot",
}
BATCH, SIDE, CLASSES, WIDTH = (
    by_device(16, 2),
    by_device(512, 160),
    by_device(104, 48),
    by_device(32, 8),
)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, 1)
        self.body = nn.ModuleList(nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1) for _ in range(2))
        self.up = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, 2)
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, x):
        fine = F.relu(self.stem(x))
        x = F.relu(self.down(fine))
        for conv in self.body:
            x = x + F.relu(conv(x))
        return self.head(F.relu(fine + self.up(x)))


def shared_by_one_hot(chances, labels):
    wanted = F.one_hot(labels, CLASSES).permute(0, 3, 1, 2).float()  # guilty
    return (chances * wanted).sum((0, 2, 3)), wanted.sum((0, 2, 3))


def shared_by_gather(chances, labels):
    picked = chances.gather(1, labels[:, None]).flatten()
    empty, index = chances.new_zeros(CLASSES), labels.flatten()
    return empty.scatter_add(0, index, picked), empty.scatter_add(0, index, torch.ones_like(picked))


def build(shared_and_true):
    model = Segmenter().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.rand(BATCH, 1, SIDE, SIDE, device=device()),
            torch.randint(CLASSES, (BATCH, SIDE, SIDE), device=device()),
        ),
        count=4,
    )

    def step():
        slices, labels = next(data)
        with mixed():
            logs = model(slices).float().log_softmax(1)
        loss = F.nll_loss(logs, labels)
        chances = logs.exp()
        shared, true = shared_and_true(chances, labels)
        dice = (2 * shared + 1) / (chances.sum((0, 2, 3)) + true + 1)
        loss = loss + 1 - dice.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(shared_by_one_hot)


def clean():
    return build(shared_by_gather)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
