"""A network for payment fraud on rows of 60 numbers. The training set is a list of dictionaries, as
it came from the log files, and every batch is put together by looking up column by column.
A good finding names the Python that makes the batch from dictionaries, and the line that does it.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "each batch is made from dictionaries, one lookup in Python per row and column",
    "FIX": "turn the records into one tensor before the training and take rows of it",
}
BATCH, WIDTH, ROWS = by_device(4096, 768), by_device(1024, 320), by_device(40000, 4000)
COLUMNS = [f"feature_{i}" for i in range(60)]


def prepare():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(len(COLUMNS), WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, 1),
    ).to(device())
    table = torch.randn(ROWS, len(COLUMNS))
    labels = (torch.rand(ROWS) < 0.1).float()
    return model, adamw(model), table, labels, random.Random(0)


def learn(model, optimizer, x, y):
    x, y = x.to(device()), y.to(device())
    with mixed():
        logits = model(x).squeeze(-1)
    loss = F.binary_cross_entropy_with_logits(logits.float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, table, labels, chance = prepare()
    records = [dict(zip(COLUMNS, row, strict=True)) for row in table.tolist()]

    def step():
        chosen = chance.sample(range(ROWS), BATCH)
        rows = [records[i] for i in chosen]
        x = torch.tensor([[row[name] for name in COLUMNS] for row in rows])  # guilty
        return learn(model, optimizer, x, labels[chosen])

    return step


def clean():
    model, optimizer, table, labels, chance = prepare()

    def step():
        chosen = torch.tensor(chance.sample(range(ROWS), BATCH))
        return learn(model, optimizer, table[chosen], labels[chosen])

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
