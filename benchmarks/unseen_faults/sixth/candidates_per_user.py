"""A recommender draws one item per user that the user has not bought. For every user of every batch
all items are listed and those bought are taken away, to draw a single one of what is left.
A good finding names the step's wait for data, or the time in setdiff1d, and its line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all items that a user has not bought are listed again for every user of every batch, to draw one",
    "FIX": "list them once per user, or draw until an item is new",
}
USERS, ITEMS, BOUGHT = 500, by_device(10_000, 4000), 50
BATCH, WIDTH = by_device(512, 256), by_device(512, 128)


def listed_each_time(bought):
    items = np.arange(ITEMS)

    def draw(users, luck):
        found = np.empty(len(users), np.int64)
        for i, user in enumerate(users):
            free = np.setdiff1d(items, bought[user])  # guilty
            found[i] = free[int(luck[i] * len(free))]
        return found

    return draw


def listed_once(bought):
    items = np.arange(ITEMS)
    free = np.stack([np.setdiff1d(items, b) for b in bought])

    def draw(users, luck):
        return free[users, (luck * free.shape[1]).astype(np.int64)]

    return draw


def batches(make_draw):
    chance = np.random.default_rng(0)
    bought = np.stack([chance.choice(ITEMS, BOUGHT, replace=False) for _ in range(USERS)])
    draw = make_draw(bought)
    while True:
        users = chance.integers(USERS, size=BATCH)
        liked = bought[users, chance.integers(BOUGHT, size=BATCH)]
        other = draw(users, chance.random(BATCH))
        yield [torch.from_numpy(x).to(device()) for x in (users, liked, other)]


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.score = nn.Sequential(
            nn.Linear(2 * WIDTH, 4 * WIDTH),
            nn.ReLU(),
            nn.Linear(4 * WIDTH, 4 * WIDTH),
            nn.ReLU(),
            nn.Linear(4 * WIDTH, 1),
        )

    def forward(self, users, liked, other):
        user = self.users(users)
        pairs = [torch.cat([user, self.items(item)], 1) for item in (liked, other)]
        good, bad = self.score(torch.cat(pairs)).chunk(2)
        return -F.logsigmoid(good - bad).mean()


def build(make_draw):
    model = Recommender().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = batches(make_draw)

    def step():
        loss = model(*next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(listed_each_time)


def clean():
    return build(listed_once)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
