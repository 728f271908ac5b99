"""Negatives of a recommender are drawn until one is found that the user has not seen. What a user
has seen is a list, so every question whether an item is in it goes through up to 1500 numbers.
A good finding names the wait for the batch, or the time in Python while negatives are drawn, and
the line that looks an item up or the one that takes the batch.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "whether an item was seen is looked up in a list of 1500 numbers, hundreds of times per batch",
    "FIX": "keep the seen items of a user in a set",
}
BATCH, USERS, ITEMS, SEEN = by_device(512, 128), 500, 5000, 1500
NEGATIVES, FACTORS, WIDTH = by_device(4, 2), 32, by_device(2048, 2560)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, FACTORS), nn.Embedding(ITEMS, FACTORS)
        self.layers = nn.Sequential(
            nn.Linear(2 * FACTORS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64), nn.ReLU()
        )
        self.out = nn.Linear(64, 1)

    def forward(self, users, items):
        users = self.users(users)[:, None].expand(-1, items.shape[1], -1)
        return self.out(self.layers(torch.cat([users, self.items(items)], -1)))[..., 0]


def draw(chance, seen):
    while True:
        users = [chance.randrange(USERS) for _ in range(BATCH)]
        rows = []
        for user in users:
            row = [chance.randrange(ITEMS // 2)]
            while len(row) <= NEGATIVES:
                item = chance.randrange(ITEMS)
                if item not in seen[user]:  # guilty
                    row.append(item)
            rows.append(row)
        yield torch.tensor(users), torch.tensor(rows)


def build(kind):
    chance = random.Random(1)
    seen = [kind(chance.sample(range(ITEMS), SEEN)) for _ in range(USERS)]
    model = Scorer().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = draw(chance, seen)
    first = torch.zeros(BATCH, dtype=torch.long, device=device())

    def step():
        users, items = (t.to(device()) for t in next(batches))
        with mixed():
            loss = F.cross_entropy(model(users, items), first)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(list)


def clean():
    return build(set)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
