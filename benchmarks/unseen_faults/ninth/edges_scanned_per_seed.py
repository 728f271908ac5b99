"""Neighbors are sampled for a batch of nodes; those of each node are found by comparing the targets
of all edges with its number. Edges that are sorted once by target have the neighbors of a node side
by side. Both twins draw the same neighbors from the same seed.
A good finding names the search through all edges on the host, and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the neighbors of every node of a batch are searched for in the list of all edges",
    "FIX": "sort the edges by target once and keep where each node's begin",
}
NODES, EDGES, BATCH, NEAR = 10_000, 120_000, by_device(1024, 384), 10
FEATURES, WIDTH, CLASSES = by_device(512, 128), by_device(1024, 128), 40


class Scanning:
    def __init__(self, source, target):
        self.source, self.target = source, target

    def neighbors(self, seeds, rng):
        rows = []
        for seed in seeds:
            near = self.source[self.target == seed]  # guilty
            rows.append(near[(rng.random(NEAR) * len(near)).astype(int)])
        return np.stack(rows)


class Sorted:
    def __init__(self, source, target):
        self.source = source[np.argsort(target, kind="stable")]
        self.degree = np.bincount(target, minlength=NODES)
        self.begin = np.cumsum(self.degree) - self.degree

    def neighbors(self, seeds, rng):
        chosen = (rng.random((len(seeds), NEAR)) * self.degree[seeds, None]).astype(int)
        return self.source[self.begin[seeds, None] + chosen]


class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.own = nn.Linear(FEATURES, WIDTH)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, own, near):
        pooled = self.message(near).amax(1)
        return self.head(F.relu(torch.cat([self.own(own), pooled], 1)))


def prepare(kind):
    rng = np.random.default_rng(0)
    ring = np.arange(NODES)  # every node has a neighbor
    source = np.concatenate([np.roll(ring, 1), rng.integers(0, NODES, EDGES - NODES)])
    target = np.concatenate([ring, rng.integers(0, NODES, EDGES - NODES)])
    graph = kind(source, target)
    model = Sage().to(device())
    features = torch.randn(NODES, FEATURES, device=device())
    labels = torch.randint(CLASSES, (NODES,), device=device())
    optimizer = adamw(model)

    def step():
        seeds = rng.integers(0, NODES, BATCH)
        near = torch.from_numpy(graph.neighbors(seeds, rng)).to(device())
        seeds = torch.from_numpy(seeds).to(device())
        rows = features.index_select(0, near.flatten()).view(BATCH, NEAR, FEATURES)
        with mixed():
            logits = model(features.index_select(0, seeds), rows)
            loss = F.cross_entropy(logits, labels.index_select(0, seeds))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return prepare(Scanning)


def clean():
    return prepare(Sorted)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
