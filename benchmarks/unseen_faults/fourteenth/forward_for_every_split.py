"""A graph network classifies papers, full batch, in the way of the tutorials: after every update a
`test()` reports the accuracy on the training, validation and test nodes. It calls the model once
for each of the three masks, though every call computes the scores of all nodes, so two of the three
forward passes give what is already there.
A good finding names the repeated forward passes over the same graph in the evaluation, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the evaluation runs the same forward pass over the whole graph once for each of the three splits",
    "FIX": "run the model once and index its predictions by the three masks",
}
NODES, DEGREE, FEATURES = by_device(100_000, 2500), 8, by_device(256, 64)
WIDTH, CLASSES = by_device(256, 64), 40


class Convolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.near = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, source, target):
        sent = self.near(x)
        received = torch.zeros_like(sent).index_add(0, target, sent.index_select(0, source))
        return self.own(x) + received / DEGREE


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Convolution(FEATURES, WIDTH)
        self.second = Convolution(WIDTH, WIDTH)
        self.last = Convolution(WIDTH, CLASSES)

    def forward(self, x, source, target):
        x = F.dropout(F.relu(self.first(x, source, target)), 0.3, self.training)
        x = F.dropout(F.relu(self.second(x, source, target)), 0.3, self.training)
        return self.last(x, source, target)


def forward_per_split(model, graph, labels, splits):
    found = []
    for split in splits:
        guess = model(*graph).argmax(-1)  # guilty
        found.append((guess[split] == labels[split]).float().mean())
    return torch.stack(found)


def one_forward(model, graph, labels, splits):
    right = (model(*graph).argmax(-1) == labels).float()
    return torch.stack([right[split].mean() for split in splits])


def build(accuracies):
    model = Graph().to(device())
    optimizer = adamw(model)
    target = torch.arange(NODES, device=device()).repeat_interleave(DEGREE)
    source = torch.randint(NODES, (NODES * DEGREE,), device=device())
    splits = torch.randperm(NODES, device=device()).split([NODES // 2, NODES // 4, NODES // 4])
    train = splits[0]
    data = in_turn(
        lambda: (
            torch.randn(NODES, FEATURES, device=device()),
            torch.randint(CLASSES, (NODES,), device=device()),
        ),
        1,
    )
    history = []

    def step():
        x, labels = next(data)
        model.train()
        loss = F.cross_entropy(model(x, source, target)[train], labels[train])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            history.append(accuracies(model, (x, source, target), labels, splits))
        return loss.detach()

    return step


def faulty():
    return build(forward_per_split)


def clean():
    return build(one_forward)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
