"""Gradients are accumulated over four micro-batches of triplets, and each of them propagates the
embeddings of all users and items through the whole graph, which is the same every time: the weights
change once per step.
A good finding names the propagation that is computed again per micro-batch, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the embeddings of the whole graph are propagated once per micro-batch although they are the same for all",
    "FIX": "propagate once per step and take all triplets from the result",
}
USERS, ITEMS, EDGES = (
    by_device(100_000, 3000),
    by_device(50_000, 3000),
    by_device(2_000_000, 60_000),
)
WIDTH, LAYERS, MICRO, BATCH = by_device(64, 32), 2, 4, by_device(8192, 512)


class Recommender(nn.Module):
    """LightGCN: sums over neighbors, weighted by the degrees, and the mean over the layers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(0.1 * torch.randn(USERS + ITEMS, WIDTH))
        user, item = torch.randint(USERS, (EDGES,)), USERS + torch.randint(ITEMS, (EDGES,))
        source, target = torch.cat([user, item]), torch.cat([item, user])
        degree = torch.bincount(target, minlength=USERS + ITEMS).clamp(min=1).float()
        self.register_buffer("source", source)
        self.register_buffer("target", target)
        self.register_buffer("weight", (degree[source] * degree[target]).rsqrt()[:, None])

    def propagate(self):
        h = total = self.table
        for _ in range(LAYERS):
            message = h.index_select(0, self.source) * self.weight
            h = torch.zeros_like(h).index_add(0, self.target, message)
            total = total + h
        return total / (LAYERS + 1)


def bpr(h, triplets):
    user, good, bad = (h.index_select(0, part) for part in triplets)
    return -F.logsigmoid((user * good).sum(1) - (user * bad).sum(1)).mean()


def prepare():
    model = Recommender().to(device())

    def triplets():
        user = torch.randint(USERS, (1, MICRO, BATCH), device=device())
        items = USERS + torch.randint(ITEMS, (2, MICRO, BATCH), device=device())
        return torch.cat([user, items])

    return model, adamw(model), in_turn(triplets)


def faulty():
    model, optimizer, data = prepare()

    def step():
        batch, total = next(data), 0
        for micro in range(MICRO):
            h = model.propagate()  # guilty
            loss = bpr(h, batch[:, micro]) / MICRO
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        h = model.propagate()
        loss = bpr(h, next(data).flatten(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
