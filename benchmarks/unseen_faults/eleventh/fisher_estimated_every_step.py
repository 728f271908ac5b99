"""Continual learning with elastic weight consolidation: the second task's loss has a penalty by the Fisher
information of the first task's weights. It is estimated anew in every step, from the same stored images.
A good finding names the Fisher estimate, which is the same in every step, and the line that computes it.
"""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the Fisher information of the old task, from the old weights and stored images, is estimated in every step",
    "FIX": "estimate the Fisher information once, when the old task ends",
}
BATCH, SIDE, CLASSES = by_device(512, 96), by_device(32, 24), 10
CHANNELS = by_device(64, 16)


def network():
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * CHANNELS, 4 * CHANNELS, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * CHANNELS, CLASSES),
    ).to(device())


def some():
    images = torch.randn(BATCH, 3, SIDE, SIDE, device=device())
    return images, torch.randint(CLASSES, (BATCH,), device=device())


def fisher_information(model, stored):
    """Return the squared gradient of the likelihood of stored images for every weight."""
    images, labels = stored
    with mixed():
        logits = model(images)
    gradients = torch.autograd.grad(F.cross_entropy(logits.float(), labels), model.parameters())
    return [g.square() for g in gradients]


def prepare():
    torch.manual_seed(0)
    old, stored = network(), some()
    model = deepcopy(old)
    return old, stored, model, adamw(model), in_turn(some)


def learn(model, optimizer, batch, old, fisher):
    images, labels = batch
    with mixed():
        logits = model(images)
    pairs = zip(fisher, model.parameters(), old.parameters(), strict=True)
    penalty = sum((f * (p - q.detach()).square()).sum() for f, p, q in pairs)
    loss = F.cross_entropy(logits.float(), labels) + 100.0 * penalty
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    old, stored, model, optimizer, data = prepare()

    def step():
        fisher = fisher_information(old, stored)  # guilty
        return learn(model, optimizer, next(data), old, fisher)

    return step


def clean():
    old, stored, model, optimizer, data = prepare()
    fisher = fisher_information(old, stored)

    def step():
        return learn(model, optimizer, next(data), old, fisher)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
