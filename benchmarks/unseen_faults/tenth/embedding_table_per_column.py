"""A click model has an nn.Embedding of its own for each of many categorical columns and looks them
up one after the other: hundreds of tiny lookups, forward and backward, and as many small weights.
A good finding names the many small lookups in a Python loop, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 4096,
    "CPU_BATCH": 128,
    "CAUSE": "every categorical column has its own table, looked up one by one in a Python loop",
    "FIX": "one table for all columns, with an offset per column, and one lookup",
}
COLUMNS, VALUES, DIM = by_device(400, 480), by_device(1000, 40), 8
WIDTH = by_device(1024, 192)


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables(torch.randn(COLUMNS * VALUES, DIM) * 0.1)
        self.layers = nn.Sequential(
            nn.Linear(COLUMNS * DIM, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, codes):
        return self.head(self.layers(self.embed(codes))).squeeze(-1)


class Apart(Clicks):
    def tables(self, start):
        parts = start.split(VALUES)
        self.columns = nn.ModuleList(nn.Embedding.from_pretrained(p.clone(), False) for p in parts)

    def embed(self, codes):
        return torch.cat([table(codes[:, i]) for i, table in enumerate(self.columns)], 1)  # guilty


class Together(Clicks):
    def tables(self, start):
        self.table = nn.Embedding.from_pretrained(start, False)
        self.register_buffer("offset", torch.arange(COLUMNS) * VALUES)

    def embed(self, codes):
        return self.table(codes + self.offset).flatten(1)


def build(kind):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randint(VALUES, (size, COLUMNS), device=device()),
                torch.randint(2, (size,), device=device()).float(),
            )
        )

    def loss(model, batch):
        codes, clicked = batch
        with mixed():
            out = model(codes)
        return F.binary_cross_entropy_with_logits(out.float(), clicked)

    return steplab.UserModel(kind(), batches, loss, unit="rows")


def faulty():
    return build(Apart)


def clean():
    return build(Together)
