"""The categories of a click log are strings, and the collate function turns each into a bucket by
its MD5 digest, every time its row comes up.
A good finding names the step's wait for its batch, and the line that hashes.
"""

import hashlib
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "collate hashes every category of every row with MD5, again in every epoch",
    "FIX": "hash the columns once, before the training, and keep the numbers of the buckets",
}
BATCH, COLUMNS, ROWS, BUCKETS = by_device(2048, 384), 26, by_device(16_384, 3072), 1000
FACTORS, WIDTH = 16, by_device(2048, 512)


def bucket(text):
    return int(hashlib.md5(text.encode()).hexdigest(), 16) % BUCKETS


def hashed(rows):
    return torch.tensor([[bucket(text) for text in row] for row in rows])  # guilty


def read():
    chance = random.Random(0)
    return [[f"c{j}={chance.randrange(5000)}" for j in range(COLUMNS)] for _ in range(ROWS)]


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, FACTORS)
        self.body = nn.Sequential(
            nn.Linear(COLUMNS * FACTORS, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, buckets):
        return self.body(self.table(buckets).flatten(1)).squeeze(1)


def forever(loader):
    while True:
        yield from loader


def build(rows, collate):
    model = Clicks().to(device())
    optimizer = adamw(model)
    batches = forever(DataLoader(rows, BATCH, drop_last=True, collate_fn=collate))

    def step():
        buckets = next(batches).to(device())
        clicked = (buckets[:, 0] % 2).float()
        with mixed():
            loss = F.binary_cross_entropy_with_logits(model(buckets), clicked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(read(), hashed)


def clean():
    rows = torch.tensor([[bucket(text) for text in row] for row in read()])
    return build(list(rows), torch.stack)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
