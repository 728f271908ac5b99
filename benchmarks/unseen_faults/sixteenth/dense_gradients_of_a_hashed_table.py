"""A model of click rates looks up hashed categories in one large table and trains it with Adagrad. A batch
touches a few thousand rows, but the table was made as nn.Embedding makes it by default: its gradient
is as large as the table, is zeroed in every step, and Adagrad walks through all of its zeros.
A good finding names the dense gradient (or the optimizer's pass) of the embedding table and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the large embedding table has dense gradients although a batch touches few rows",
    "FIX": "nn.Embedding(..., sparse=True)",
}
BATCH, FIELDS, NUMBERS = by_device(4096, 256), 26, 13
ROWS, WIDTH = by_device(10_000_000, 150_000), by_device(64, 16)
HIDDEN = by_device(1024, 768)


def dense_table():
    return nn.Embedding(ROWS, WIDTH)  # guilty


def sparse_table():
    return nn.Embedding(ROWS, WIDTH, sparse=True)


class Clicks(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table()
        self.net = nn.Sequential(
            nn.Linear(FIELDS * WIDTH + NUMBERS, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, categories, numbers):
        return self.net(torch.cat([self.table(categories).flatten(1), numbers], 1)).squeeze(-1)


def build(table):
    model = Clicks(table).to(device())
    optimizers = torch.optim.Adagrad(model.table.parameters(), lr=0.01), adamw(model.net)
    data = in_turn(
        lambda: (
            torch.randint(ROWS, (BATCH, FIELDS), device=device()),
            torch.randn(BATCH, NUMBERS, device=device()),
            torch.randint(2, (BATCH,), device=device()).float(),
        )
    )

    def step():
        categories, numbers, clicked = next(data)
        with mixed():
            scores = model(categories, numbers)
        loss = F.binary_cross_entropy_with_logits(scores.float(), clicked)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(dense_table)


def clean():
    return build(sparse_table)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
