"""A regression on a table that lies on the device. The class of the data keeps the raw columns, in double
precision as they were read, beside the normalized ones that the training reads.
A good finding names the raw table that no step reads, and the line that keeps it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the raw table in float64 stays on the device beside the normalized float32 table, and nothing reads it",
    "FIX": "do not keep the raw table; keep its means and deviations if they are needed",
}
ROWS, COLUMNS = by_device(4000000, 200000), 64
BATCH, WIDTH = by_device(8192, 512), by_device(1024, 512)


def read_table():
    table = torch.empty(ROWS, COLUMNS, dtype=torch.float64, device=device())
    return table.normal_(3.0, 2.0)


class Table:
    def __init__(self, raw):
        self.mean, self.deviation = raw.mean(0), raw.std(0)
        self.features = ((raw - self.mean) / self.deviation).float()
        self.raw = raw  # guilty

    def batch(self):
        rows = self.features[torch.randint(ROWS, (BATCH,), device=device())]
        return rows[:, :-1], rows[:, -1]


class TableNormalized(Table):
    def __init__(self, raw):
        self.mean, self.deviation = raw.mean(0), raw.std(0)
        self.features = ((raw - self.mean) / self.deviation).float()


def training(table):
    model = nn.Sequential(
        nn.Linear(COLUMNS - 1, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, 1),
    ).to(device())
    optimizer = adamw(model)

    def step():
        x, y = table.batch()
        with mixed():
            guess = model(x).squeeze(1)
        loss = F.smooth_l1_loss(guess.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    torch.manual_seed(0)
    return training(Table(read_table()))


def clean():
    torch.manual_seed(0)
    return training(TableNormalized(read_table()))


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
