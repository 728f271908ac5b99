"""A traffic model learns its graph: the adjacency matrix is a softmax over products of two embeddings
of the sensors. The two embeddings are shared by all layers, but every layer computes the matrix,
sensors x sensors, for itself, and its gradient too. Computed once per forward and handed to the
layers it gives the same.
A good finding names the adjacency that every layer computes again and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 8,
    "CPU_BATCH": 2,
    "CAUSE": "the learned adjacency matrix, the same for all layers, is computed again in every layer",
    "FIX": "compute it once per forward and pass it to the layers",
}
SENSORS, RANK = by_device(6144, 512), 16
TIME, WIDTH, LAYERS = 12, by_device(128, 32), by_device(8, 6)


class Graph(nn.Module):
    """Two embeddings of the sensors, which all layers share."""

    def __init__(self):
        super().__init__()
        self.source = nn.Parameter(torch.randn(SENSORS, RANK) * 0.3)
        self.target = nn.Parameter(torch.randn(RANK, SENSORS) * 0.3)

    def forward(self):
        scores = F.relu(self.source @ self.target)
        return scores.softmax(1).to(scores.dtype)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.own, self.near = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, adjacency):
        y = self.norm(x)
        return x + F.gelu(self.own(y) + adjacency @ self.near(y))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.graph = nn.Linear(TIME, WIDTH), Graph()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TIME)


class PerLayer(Model):
    def forward(self, series):
        x = self.embed(series)
        for layer in self.layers:
            x = layer(x, self.graph())  # guilty
        return self.head(x)


class Once(Model):
    def forward(self, series):
        x, adjacency = self.embed(series), self.graph()
        for layer in self.layers:
            x = layer(x, adjacency)
        return self.head(x)


def build(kind):
    my_turn()

    def batch(size):
        return torch.randn(2, size, SENSORS, TIME, device=device()).unbind()

    def loss(model, pair):
        with mixed():
            return F.l1_loss(model(pair[0]), pair[1])

    return steplab.UserModel(
        kind(), lambda size: in_turn(lambda: batch(size), 4), loss, unit="series"
    )


def faulty():
    return build(PerLayer)


def clean():
    return build(Once)
