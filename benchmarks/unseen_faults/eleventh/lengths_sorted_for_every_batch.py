"""A sequential recommender is trained on batches of users whose histories are about equally long. The
sampler sorts all users by the length of their history whenever it makes a batch.
A good finding names the sorting of all users in every step, and the line that does it.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the sampler sorts all users by the length of their history for every single batch",
    "FIX": "sort the users once in the sampler's constructor",
}
USERS, ITEMS, LONGEST = 40000, 1000, 40
BATCH, WIDTH = by_device(1024, 32), by_device(256, 64)


class LengthBatches:
    """Batches of users with histories of about the same length."""

    def __init__(self, histories):
        self.histories, self.random = histories, random.Random(1)

    def next_users(self):
        users = sorted(range(USERS), key=lambda user: len(self.histories[user]))  # guilty
        start = self.random.randrange(USERS - BATCH)
        return users[start : start + BATCH]


class LengthBatchesSortedOnce(LengthBatches):
    def __init__(self, histories):
        super().__init__(histories)
        self.users = sorted(range(USERS), key=lambda user: len(histories[user]))

    def next_users(self):
        start = self.random.randrange(USERS - BATCH)
        return self.users[start : start + BATCH]


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH, padding_idx=0)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, ITEMS)

    def forward(self, items):
        return self.head(self.gru(self.items(items))[0])


def training(sampler_class):
    torch.manual_seed(0)
    chance = random.Random(0)
    lengths = [chance.randint(20, LONGEST) for _ in range(USERS)]
    histories = [tuple(chance.choices(range(1, ITEMS), k=length)) for length in lengths]
    sampler = sampler_class(histories)
    model = Recommender().to(device())
    optimizer = adamw(model)

    def step():
        batch = [histories[user] for user in sampler.next_users()]
        longest = max(map(len, batch))
        items = torch.tensor([h + (0,) * (longest - len(h)) for h in batch]).to(device())
        with mixed():
            logits = model(items[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), items[:, 1:].flatten(), ignore_index=0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(LengthBatches)


def clean():
    return training(LengthBatchesSortedOnce)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
