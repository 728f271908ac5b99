"""A graph network averages the states of each molecule in a Python loop: for every molecule of the
batch, the numbers of all nodes are compared with its own and its rows picked by that mask.
A good finding names the many small comparisons and lookups, and the line of the loop.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 512,
    "CPU_BATCH": 128,
    "CAUSE": "the states of each molecule are picked by a mask of all nodes, in a loop over the molecules",
    "FIX": "one index_add over all nodes, divided by the counts",
}
NODES, DEGREE, WIDTH, LAYERS = 20, 4, by_device(256, 96), by_device(4, 3)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.others = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, sources, targets):
        sent = self.others(x).index_select(0, sources)
        return F.relu(self.own(x).index_add(0, targets, sent))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x, sources, targets, owner, count):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, sources, targets)
        return self.head(self.readout(x, owner, count))[:, 0]


class OneByOne(Network):
    def readout(self, x, owner, count):
        return torch.stack([x[owner == g].mean(0) for g in range(count)])  # guilty


class AllAtOnce(Network):
    def readout(self, x, owner, count):
        total = x.new_zeros(count, x.shape[1]).index_add(0, owner, x)
        return total / torch.bincount(owner, minlength=count)[:, None]


def make(size):
    owner = torch.arange(size).repeat_interleave(NODES)
    targets = torch.arange(size * NODES).repeat_interleave(DEGREE)
    sources = targets // NODES * NODES + torch.randint(NODES, targets.shape)
    values = [torch.randn(size * NODES, 16), sources, targets, owner]
    return [v.to(device()) for v in values], size, torch.randn(size, device=device())


def build(network):
    my_turn()

    def loss(model, batch):
        graph, count, goal = batch
        with mixed():
            return F.mse_loss(model(*graph, count), goal)

    return steplab.UserModel(
        network(), lambda size: in_turn(lambda: make(size)), loss, unit="molecules"
    )


def faulty():
    return build(OneByOne)


def clean():
    return build(AllAtOnce)
