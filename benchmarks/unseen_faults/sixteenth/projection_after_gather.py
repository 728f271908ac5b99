"""A graph network predicts a property per node by message passing. Each layer gathers the neighbor's state
for every edge and then applies the linear layer for messages, so the product runs over edges, eight
times as many rows as there are nodes, and each node's state is projected once per neighbor.
A good finding names the linear layer applied to the gathered rows of the edges instead of to the nodes
before the gather, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the message projection runs over all edges although it depends on the source node alone",
    "FIX": "project the nodes, then gather the projected states along the edges",
    "BATCH": 64,
    "CPU_BATCH": 16,
}
NODES, NEIGHBORS, INPUTS = by_device(400, 120), 8, 32
WIDTH, LAYERS = by_device(256, 64), by_device(4, 3)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.neighbor, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def messages(self, x, source):
        return self.neighbor(x).index_select(0, source)

    def forward(self, x, source, target):
        found = self.messages(x, source)
        gathered = torch.zeros_like(found[: len(x)]).index_add(0, target, found) / NEIGHBORS
        return x + F.gelu(self.norm(self.own(x) + gathered))


class LayerOnEdges(Layer):
    def messages(self, x, source):
        return self.neighbor(x.index_select(0, source))  # guilty


class GraphNet(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.start, self.end = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x, source, target):
        x = self.start(x)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.end(x).squeeze(-1)


def loss_of(model, batch):
    features, source, target, wanted = batch
    with mixed():
        return F.mse_loss(model(features, source, target).float(), wanted)


def batches(size):
    count = size * NODES

    def make():
        target = torch.arange(count, device=device()).repeat_interleave(NEIGHBORS)
        inside = torch.randint(NODES, (count * NEIGHBORS,), device=device())
        source = target // NODES * NODES + inside
        features = torch.randn(count, INPUTS, device=device())
        return features, source, target, torch.randn(count, device=device())

    return in_turn(make)


def build(layer):
    import steplab

    return steplab.UserModel(GraphNet(layer), batches, loss_of, optimizer=adamw)


def faulty():
    return build(LayerOnEdges)


def clean():
    return build(Layer)
