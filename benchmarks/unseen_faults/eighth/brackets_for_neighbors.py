"""A graph network takes the state of each edge's source with brackets, h[source]. The backward of
such indexing sorts all edges and adds the gradients of each node's edges one after the other, which
is slow where a few nodes have many edges, as in social graphs. index_select takes the same rows, and
its backward adds them in parallel.
A good finding names the backward of the indexing (index_put, its sort) and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 100,
    "CPU_BATCH": 4,
    "CAUSE": "rows are taken with h[source], whose backward sorts the edges and adds up each node's gradients one by one",
    "FIX": "h.index_select(0, source)",
}
NODES, EDGES, WIDTH, LAYERS = by_device(2000, 500), 10, by_device(128, 64), by_device(3, 2)
FEATURES, OF_EDGE, CLASSES = 64, 8, 16


class Layer(nn.Module):
    """Mean of relu(state of the source + features of the edge)."""

    def __init__(self):
        super().__init__()
        self.edge, self.norm = nn.Linear(OF_EDGE, WIDTH), nn.LayerNorm(WIDTH)
        self.own, self.others = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, source, target, features):
        h = self.others(x)
        message = F.relu(self.sources(h, source) + self.edge(features))
        total = torch.zeros_like(h).index_add(0, target, message)
        return F.relu(self.norm(self.own(x) + total / EDGES))


class Brackets(Layer):
    def sources(self, h, source):
        return h[source]  # guilty


class Selected(Layer):
    def sources(self, h, source):
        return h.index_select(0, source)


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x, source, target, features):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, source, target, features)
        return self.head(x)


def build(layer):
    my_turn()

    def graph(size):
        nodes = size * NODES
        edges = nodes * EDGES
        popular = torch.rand(edges, device=device()) ** 3
        source = (popular * nodes).long().clamp_max(nodes - 1)
        target = torch.arange(nodes, device=device()).repeat_interleave(EDGES)
        x = torch.randn(nodes, FEATURES, device=device())
        label = torch.randint(CLASSES, (nodes,), device=device())
        return x, source, target, torch.randn(edges, OF_EDGE, device=device()), label

    def loss(model, batch):
        *inputs, label = batch
        with mixed():
            return F.cross_entropy(model(*inputs).float(), label)

    return steplab.UserModel(
        Model(layer), lambda size: in_turn(lambda: graph(size), 4), loss, unit="subgraphs"
    )


def faulty():
    return build(Brackets)


def clean():
    return build(Selected)
