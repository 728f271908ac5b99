"""A network on tabular data reads a TensorDataset through an ordinary DataLoader. The table lies in
memory, and yet every row is taken out by itself and a thousand rows are stacked again by the
collate function. A sampler of whole batches and `batch_size=None` index the table once per batch,
and give the same rows in the same order.
A good finding names the loader (rows fetched and collated one by one on the host) and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from common import adamw, by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the DataLoader takes each row of an in-memory table by itself and stacks them again",
    "FIX": "index whole batches: sampler=BatchSampler(...) with batch_size=None",
}
ROWS, BATCH, COLUMNS = by_device(200_000, 40_000), by_device(4096, 1024), 64
WIDTH, LAYERS = by_device(3072, 160), by_device(5, 3)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


def row_by_row(table, order):
    return DataLoader(table, batch_size=BATCH, sampler=order, drop_last=True)  # guilty


def by_batch(table, order):
    return DataLoader(table, batch_size=None, sampler=BatchSampler(order, BATCH, drop_last=True))


def epochs(loader):
    while True:
        yield from loader


def build(load):
    model = nn.Sequential(
        nn.Linear(COLUMNS, WIDTH), *(Residual() for _ in range(LAYERS)), nn.Linear(WIDTH, 1)
    ).to(device())
    optimizer = adamw(model)
    table = TensorDataset(torch.randn(ROWS, COLUMNS), torch.randn(ROWS))
    order = RandomSampler(table, generator=torch.Generator().manual_seed(3))
    data = epochs(load(table, order))

    def step():
        x, y = next(data)
        loss = F.mse_loss(model(x.to(device())).squeeze(1), y.to(device()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(row_by_row)


def clean():
    return build(by_batch)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
