"""A retrieval model of two towers scores each user against the clicked item and a set of negatives
that the whole batch shares. The numbers of the negatives are expanded to every user and looked up for
each: the lookup writes users x negatives vectors, and its backward sorts and adds as many rows. The
vectors of the negatives, looked up once, give all scores in one matrix product.
A good finding names the lookup of the same negatives for every user and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 8192,
    "CPU_BATCH": 384,
    "CAUSE": "negatives that all users share are looked up once per user, users x negatives vectors in all",
    "FIX": "look up the negatives once and multiply users @ negatives.T",
}
ITEMS, NEGATIVES, HISTORY = by_device(100_000, 5_000), by_device(512, 128), by_device(50, 20)
WIDTH, HIDDEN, LAYERS = by_device(128, 64), by_device(4096, 512), by_device(4, 2)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.clicks = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean")
        self.items = nn.Embedding(ITEMS, WIDTH)
        sizes = [WIDTH] + [HIDDEN] * LAYERS
        layers = [
            nn.Sequential(nn.Linear(a, b), nn.ReLU())
            for a, b in zip(sizes, sizes[1:], strict=False)
        ]
        self.user = nn.Sequential(*layers, nn.Linear(HIDDEN, WIDTH))


class PerUser(Towers):
    def forward(self, history, clicked, negatives):
        users = self.user(self.clicks(history))
        negatives = self.items(negatives.expand(len(users), -1))  # guilty
        scores = (negatives @ users[:, :, None]).squeeze(-1)
        positive = (self.items(clicked) * users).sum(-1, keepdim=True)
        return torch.cat([positive, scores], 1)


class Shared(Towers):
    def forward(self, history, clicked, negatives):
        users = self.user(self.clicks(history))
        scores = users @ self.items(negatives).T
        positive = (self.items(clicked) * users).sum(-1, keepdim=True)
        return torch.cat([positive, scores], 1)


def build(model):
    my_turn()

    def batch(size):
        draw = [(size, HISTORY), (size,), (NEGATIVES,)]
        return [torch.randint(ITEMS, shape, device=device()) for shape in draw]

    def loss(model, batch):
        with mixed():
            scores = model(*batch)
            clicked = torch.zeros(
                len(scores), dtype=torch.long, device=scores.device
            )  # the first column
            return F.cross_entropy(scores, clicked)

    with torch.device(device()):
        towers = model()
    return steplab.UserModel(
        towers, lambda size: in_turn(lambda: batch(size), 4), loss, unit="users"
    )


def faulty():
    return build(PerUser)


def clean():
    return build(Shared)
