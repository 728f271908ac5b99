"""Organs are segmented in slices of CT scans, and the Dice score of the epoch shall be told at its end. For
that the loop keeps the probability maps of every step, detached, together with the labels, until the epoch
is over; the sums of overlap and area per organ, which the score is made of, are some numbers a step.
A good finding names the memory that grows with every step by the kept maps, and the line that appends.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the probability maps of all steps are kept for the score of the epoch",
    "FIX": "add up the overlap and the areas per organ in each step and keep only these sums",
}
BATCH, SIDE, ORGANS = by_device(8, 4), by_device(256, 144), 14
WIDTH, LAYERS = by_device(64, 32), by_device(6, 3)


class OrganNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, 4, stride=4)
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(LAYERS))
        self.head = nn.ConvTranspose2d(WIDTH, ORGANS, 4, stride=4)

    def forward(self, slices):
        x = F.relu(self.stem(slices))
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(x)


class KeepMaps:
    def __init__(self):
        self.maps = []

    def add(self, maps, labels):
        self.maps.append((maps, labels.byte()))  # guilty


class KeepSums:
    def __init__(self):
        self.both = torch.zeros(ORGANS, device=device())
        self.area = torch.zeros(ORGANS, device=device())

    def add(self, maps, labels):
        picked = maps.gather(1, labels[:, None]).flatten()
        self.both.index_add_(0, labels.flatten(), picked)
        self.area += maps.sum((0, 2, 3)) + torch.bincount(labels.flatten(), minlength=ORGANS)


def training(score):
    torch.manual_seed(0)
    model = OrganNet().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def make():
        slices = torch.randn(BATCH, 1, SIDE, SIDE, device=device())
        return slices, torch.randint(ORGANS, (BATCH, SIDE, SIDE), device=device())

    batches = in_turn(make)

    def step():
        slices, labels = next(batches)
        logits = model(slices)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        score.add(logits.detach().softmax(1), labels)
        return loss

    return step


def faulty():
    return training(KeepMaps())


def clean():
    return training(KeepSums())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
