"""The mean over the neighbors divides sums by counts. The counts are made by adding up a tensor of
ones that is as wide as the messages, edges x width, in every layer and step, although the graph never
changes and one number per node is enough.
A good finding names the adding of ones (edges x width) or that it is the same in every layer and step,
and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the number of neighbors is counted once per feature, by adding rows of ones of all edges, in every layer and step",
    "FIX": "count the edges of each node once, with one number per node",
}
NODES, DEGREE, FEATURES = by_device(100_000, 2500), 48, 32
WIDTH, LAYERS, CLASSES = by_device(256, 64), 3, 10


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def mean(self, h, source, target, share):
        messages = h.index_select(0, source)
        total = torch.zeros_like(h).index_add_(0, target, messages)
        count = torch.zeros_like(h).index_add_(0, target, torch.ones_like(messages))  # guilty
        return total / count.clamp(min=1)

    def forward(self, h, source, target, share):
        return h + F.relu(self.own(h) + self.other(self.mean(h, source, target, share)))


class CountedOnce(Layer):
    def mean(self, h, source, target, share):
        total = torch.zeros_like(h).index_add_(0, target, h.index_select(0, source))
        return total * share


class Sage(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x, *graph):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, *graph)
        return self.head(h)


def prepare(layer):
    model = Sage(layer).to(device())
    optimizer = adamw(model)
    x = torch.randn(NODES, FEATURES, device=device())
    labels = torch.randint(CLASSES, (NODES,), device=device())
    source, target = torch.randint(NODES, (2, NODES * DEGREE), device=device())
    target = target.sort().values
    share = 1 / torch.bincount(target, minlength=NODES).clamp(min=1).unsqueeze(1)

    def step():
        with mixed():
            loss = F.cross_entropy(model(x, source, target, share), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return prepare(Layer)


def clean():
    return prepare(CountedOnce)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
