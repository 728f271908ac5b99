"""A network on a table of measurements that lies in memory. It was assembled column by column, as the files
came, and stayed that way: a batch of random rows is picked across all columns, so each of its numbers comes
from another corner of memory. Stored row by row, once, a batch is a few hundred contiguous copies.
A good finding names the gather out of the column-wise table (its strides), and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "random rows are gathered out of a table that lies column by column in memory",
    "FIX": "make the table row-major once (columns.T.contiguous()) and index its first dimension",
}
ROWS, COLUMNS, SIZE = by_device(1_000_000, 300_000), by_device(512, 128), by_device(16_384, 6144)
WIDTH, CLASSES = by_device(512, 64), 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(COLUMNS)
        self.body = nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.body(self.norm(x)))


def assemble():
    torch.manual_seed(0)
    columns = torch.stack([torch.randn(ROWS, device=device()) for _ in range(COLUMNS)])
    return columns, torch.randint(CLASSES, (ROWS,), device=device())


def training(pick_rows, labels):
    torch.manual_seed(0)
    model = Net().to(device())
    optimizer = adamw(model)

    def step():
        rows = torch.randint(ROWS, (SIZE,), device=device())
        loss = F.cross_entropy(model(pick_rows(rows)), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    columns, labels = assemble()
    table = columns.T

    def pick_rows(rows):
        return table[rows]  # guilty

    return training(pick_rows, labels)


def clean():
    columns, labels = assemble()
    table = columns.T.contiguous()

    def pick_rows(rows):
        return table[rows]

    return training(pick_rows, labels)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
