"""A graph is made undirected, duplicate edges are removed, and every edge is weighted by the degrees
of its nodes. The graph never changes, but all of this is done again in every forward.
A good finding names that the edges are sorted and weighted again in every step, and the line.
"""

from itertools import pairwise

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 1,
    "CPU_BATCH": 1,
    "CAUSE": "the edges of a fixed graph are doubled, sorted, made unique and weighted again in every forward",
    "FIX": "prepare them once and keep them in buffers",
}
NODES, EDGES = by_device(100_000, 4000), by_device(2_000_000, 80_000)
FEATURES, WIDTH, LAYERS, CLASSES = 16, by_device(64, 8), 2, 7


def prepared(edges):
    both = torch.cat([edges, edges.flip(0)], 1)
    keys = torch.unique(both[0] * NODES + both[1])
    source, target = keys // NODES, keys % NODES
    scale = torch.bincount(target, minlength=NODES).clamp(min=1).rsqrt()
    return source, target, (scale[source] * scale[target])[:, None]


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [FEATURES] + [WIDTH] * (LAYERS - 1) + [CLASSES]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))

    def propagate(self, x, source, target, weights):
        for layer in self.layers:
            x = layer(x.relu())
            x = torch.zeros_like(x).index_add(0, target, (x[source] * weights).to(x.dtype))
        return x


class EachForward(GCN):
    def __init__(self, edges):
        super().__init__()
        self.register_buffer("edges", edges)

    def forward(self, x):
        source, target, weights = prepared(self.edges)  # guilty
        return self.propagate(x, source, target, weights)


class Once(GCN):
    def __init__(self, edges):
        super().__init__()
        for name, value in zip(("source", "target", "weights"), prepared(edges), strict=True):
            self.register_buffer(name, value)

    def forward(self, x):
        return self.propagate(x, self.source, self.target, self.weights)


def build(model):
    my_turn()
    edges = torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(1))
    labels = torch.randint(CLASSES, (NODES,), device=device())

    def batches(size):
        return in_turn(lambda: torch.randn(NODES, FEATURES, device=device()), 2)

    def loss(model, x):
        with mixed():
            return F.cross_entropy(model(x), labels)

    return steplab.UserModel(model(edges), batches, loss, unit="graphs")


def faulty():
    return build(EachForward)


def clean():
    return build(Once)
