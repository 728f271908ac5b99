"""A graph network gathers the sender's state of every edge and multiplies that by the weights, so
the same product is computed once per edge instead of once per node.
A good finding names the product over all edges, many times as many rows as there are nodes, and its
line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 3,
    "CAUSE": "the linear layer of the messages runs on the gathered states of all edges instead of those of all nodes",
    "FIX": "multiply first, gather then",
}
NODES, DEGREE, WIDTH, LAYERS = by_device(4096, 384), 12, by_device(256, 96), by_device(4, 3)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.own = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.send = nn.Linear(WIDTH, WIDTH)


class PerEdge(Layer):
    def forward(self, x, source, target):
        y = self.norm(x)
        messages = self.send(y.index_select(0, source))  # guilty
        heard = torch.zeros_like(x).index_add(0, target, messages.to(x.dtype))
        return x + F.relu(self.own(y) + heard / DEGREE)


class PerNode(Layer):
    def forward(self, x, source, target):
        y = self.norm(x)
        messages = self.send(y).index_select(0, source)
        heard = torch.zeros_like(x).index_add(0, target, messages.to(x.dtype))
        return x + F.relu(self.own(y) + heard / DEGREE)


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x, source, target):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.head(x)


def build(layer):
    my_turn()

    def batches(size):
        def make():
            count = size * NODES
            first = torch.arange(size).repeat_interleave(NODES * DEGREE) * NODES
            source = first + torch.randint(NODES, (count * DEGREE,))
            target = torch.arange(count).repeat_interleave(DEGREE)
            x = torch.randn(count, 16)
            return [t.to(device()) for t in (x, source, target, x.square().sum(1, keepdim=True))]

        return in_turn(make)

    def loss(model, batch):
        x, source, target, y = batch
        with mixed():
            return F.mse_loss(model(x, source, target), y)

    return steplab.UserModel(Net(layer), batches, loss, unit="graphs")


def faulty():
    return build(PerEdge)


def clean():
    return build(PerNode)
