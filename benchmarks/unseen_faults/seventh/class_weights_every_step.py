"""Rare classes get a larger weight in the loss. The weights are computed in the step from the labels
of the whole training set, which do not change.
A good finding names the host's work on all labels in every step, and the line that counts them.
"""

import random
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the weights of the classes are counted from all labels of the training set in every step",
    "FIX": "count them once, before the training",
}
BATCH, SIZE, WIDTH, CLASSES = by_device(256, 48), 32, by_device(256, 32), 20
SAMPLES = by_device(1_000_000, 400_000)


def prepare():
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * WIDTH * 64, CLASSES),
    ).to(device())
    labels = random.Random(0).choices(range(CLASSES), k=SAMPLES)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIZE, SIZE, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    return model, adamw(model), data, labels


def balanced(labels):
    counts = Counter(labels)
    weights = [len(labels) / (CLASSES * counts[c]) for c in range(CLASSES)]
    return torch.tensor(weights, device=device())


def train(model, optimizer, x, y, weight):
    with mixed():
        loss = F.cross_entropy(model(x), y, weight=weight)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data, labels = prepare()

    def step():
        weight = balanced(labels)  # guilty
        return train(model, optimizer, *next(data), weight)

    return step


def clean():
    model, optimizer, data, labels = prepare()
    weight = balanced(labels)

    def step():
        return train(model, optimizer, *next(data), weight)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
