"""A graph network multiplies the states of its nodes by the adjacency matrix of the graph, which is
dense: a few neighbors per node are found among thousands of zeros.
A good finding names the products with the adjacency matrix, nearly all of it zeros, and their line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 1,
    "CPU_BATCH": 1,
    "CAUSE": "messages are a product with a dense adjacency matrix of nodes x nodes, nearly all zeros",
    "FIX": "add up the states along the edges with index_add",
}
NODES, WIDTH, LAYERS = by_device(20_000, 1200), by_device(256, 160), 3
DEGREE, FEATURES, CLASSES = 4, 32, 8


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        chance = torch.Generator().manual_seed(1)
        origin, target = torch.randint(NODES, (2, NODES * DEGREE), generator=chance)
        share = 1 / target.bincount(minlength=NODES).clamp(min=1)[:, None]
        self.register_buffer("origin", origin, persistent=False)
        self.register_buffer("target", target, persistent=False)
        self.register_buffer("share", share, persistent=False)
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + F.relu(layer(self.neighbors(x)))
        return self.head(x)


class Dense(Graph):
    def __init__(self):
        super().__init__()
        matrix = torch.zeros(NODES, NODES)
        matrix.index_put_((self.target, self.origin), torch.tensor(1.0), accumulate=True)
        self.register_buffer("matrix", matrix * self.share, persistent=False)

    def neighbors(self, x):
        return self.matrix @ x  # guilty


class Sparse(Graph):
    def neighbors(self, x):
        taken = x.index_select(0, self.origin)
        return torch.zeros_like(x).index_add(0, self.target, taken) * self.share


def build(graph):
    my_turn()

    def batches(size):
        x = torch.randn(NODES, FEATURES, device=device())
        y = torch.randint(CLASSES, (NODES,), device=device())
        while True:
            yield x, y

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(batch[0]), batch[1])

    return steplab.UserModel(graph(), batches, loss, unit="graphs")


def faulty():
    return build(Dense)


def clean():
    return build(Sparse)
