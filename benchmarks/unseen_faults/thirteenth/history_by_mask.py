"""A recommender reads the last items of each user and predicts the next one. The purchases of all users
lie in two long arrays, ordered by time, and for every sample of a batch the user's purchases are
picked with `items[users == user]`: each sample compares the whole log. The log sorted by user once,
with the place where each user begins, gives the histories of a batch with one index.
A good finding names the search through the whole log (or the making of the batch) and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the history of every user of a batch is picked by a comparison with the users of the whole log",
    "FIX": "sort the log by user once and take the histories by index",
}
EVENTS, USERS, ITEMS = 400_000, 2000, by_device(20_000, 1000)
BATCH, TIME = by_device(512, 80), by_device(100, 32)
WIDTH, LAYERS, HEADS = by_device(256, 64), by_device(4, 1), by_device(4, 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.positions = nn.Embedding(ITEMS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ITEMS)

    def forward(self, history):
        x = self.blocks(self.items(history) + self.positions.weight)
        return self.head(self.norm(x.mean(1)))


class Log:
    """All purchases, ordered by time."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.users, self.items = rng.integers(USERS, size=EVENTS), rng.integers(ITEMS, size=EVENTS)


class Searched(Log):
    def histories(self, users):
        """Return the last TIME + 1 items of each user."""
        rows = [self.items[self.users == user][-TIME - 1 :] for user in users]  # guilty
        return np.stack(rows)


class Sorted(Log):
    def __init__(self):
        super().__init__()
        self.by_user = self.items[np.argsort(self.users, kind="stable")]
        self.end = np.bincount(self.users, minlength=USERS).cumsum()

    def histories(self, users):
        """Return the last TIME + 1 items of each user."""
        return self.by_user[self.end[users][:, None] + np.arange(-TIME - 1, 0)]


def build(kind):
    model = Recommender().to(device())
    optimizer, log = adamw(model), kind()
    rng = np.random.default_rng(1)

    def batch():
        rows = torch.from_numpy(log.histories(rng.integers(USERS, size=BATCH)))
        if device() == "cuda":
            rows = rows.pin_memory().to("cuda", non_blocking=True)
        return rows[:, :-1], rows[:, -1]

    def step():
        history, target = batch()
        with mixed():
            loss = F.cross_entropy(model(history), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Searched)


def clean():
    return build(Sorted)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
