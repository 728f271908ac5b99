"""Rare classes are drawn more often: the number of each sample of a batch is one call of
np.random.choice with the weights of the whole dataset, which it checks and sums up every time.
A good finding names the drawing of samples on the host, and the line of choice.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "every sample is drawn by a call of choice with p, which goes through the weights of the whole dataset",
    "FIX": "sum the weights up once; searchsorted then draws a batch",
}
BATCH, FEATURES, WIDTH = by_device(512, 64), by_device(1024, 64), by_device(8192, 1408)
SAMPLES, CLASSES = by_device(200_000, 50_000), 10


class PerSample:
    def __init__(self, weights):
        self.chance, self.weights = np.random.RandomState(1), weights

    def draw(self):
        count = len(self.weights)
        return [self.chance.choice(count, p=self.weights) for _ in range(BATCH)]  # guilty


class AtOnce:
    def __init__(self, weights):
        self.chance, self.sums = np.random.RandomState(1), weights.cumsum()
        self.sums /= self.sums[-1]

    def draw(self):
        return self.sums.searchsorted(self.chance.random_sample(BATCH), side="right")


def build(sampler):
    x = torch.randn(SAMPLES, FEATURES, device=device())
    y = torch.randn(SAMPLES, device=device()).abs().mul(3).long().clamp(max=CLASSES - 1)
    counts = torch.bincount(y, minlength=CLASSES)
    weights = (1 / counts[y].double()).cpu().numpy()
    sampler = sampler(weights / weights.sum())
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    ).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        numbers = torch.as_tensor(sampler.draw()).to(device())
        with mixed():
            loss = F.cross_entropy(model(x[numbers]), y[numbers])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(PerSample)


def clean():
    return build(AtOnce)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
