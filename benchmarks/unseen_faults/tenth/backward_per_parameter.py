"""A graph network is trained with a hand-written SGD that asks autograd for the gradient of one
weight at a time: a backward pass through the network for each of them.
A good finding names the repeated backward passes over the same graph, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "autograd.grad is called once per weight, a backward through the network for each",
    "FIX": "one call of torch.autograd.grad with all weights",
}
NODES, DEGREE, FEATURES = by_device(40_000, 4000), 8, 64
WIDTH, LAYERS, CLASSES = by_device(256, 64), 3, 16


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.near = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, source, target):
        received = torch.zeros_like(x).index_add(0, target, x.index_select(0, source)) / DEGREE
        return self.own(x) + self.near(received)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [FEATURES] + (LAYERS - 1) * [WIDTH]
        self.layers = nn.ModuleList(Layer(size, WIDTH) for size in sizes)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, source, target):
        for layer in self.layers:
            x = torch.relu(layer(x, source, target))
        return self.head(x)


def one_by_one(loss, weights):
    return [torch.autograd.grad(loss, w, retain_graph=True)[0] for w in weights]  # guilty


def together(loss, weights):
    return torch.autograd.grad(loss, weights)


def build(gradients_of):
    model = Graph().to(device())
    weights = list(model.parameters())
    target = torch.arange(NODES, device=device()).repeat_interleave(DEGREE)
    source = torch.randint(NODES, (NODES * DEGREE,), device=device())
    data = in_turn(
        lambda: (
            torch.randn(NODES, FEATURES, device=device()),
            torch.randint(CLASSES, (NODES,), device=device()),
        )
    )

    def step():
        x, labels = next(data)
        loss = F.cross_entropy(model(x, source, target), labels)
        gradients = gradients_of(loss, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient, alpha=0.05)
        return loss.detach()

    return step


def faulty():
    return build(one_by_one)


def clean():
    return build(together)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
