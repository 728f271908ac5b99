"""A table that lies in memory as two tensors is given to DataLoader as a TensorDataset: it takes
the rows one at a time and stacks them to a batch again.
A good finding names the step's wait for the batch, or the thousands of tiny indexing operators, and
the line of the loader or the one that takes a batch from it.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the rows of a table in memory are fetched one by one and stacked, thousands per batch",
    "FIX": "index the tensors with all numbers of a batch at once",
}
BATCH, FEATURES, WIDTH = by_device(16_384, 2048), by_device(128, 32), by_device(4096, 256)
SAMPLES = by_device(4_000_000, 400_000)


def faulty_batches(x, y, chance):
    data = TensorDataset(x, y)
    sampler = RandomSampler(data, generator=chance)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    while True:
        for rows, targets in loader:  # guilty
            yield rows.to(device()), targets.to(device())


def clean_batches(x, y, chance):
    x, y = x.to(device()), y.to(device())
    while True:
        order = torch.randperm(len(x), generator=chance).to(device())
        for numbers in order[: len(x) // BATCH * BATCH].split(BATCH):
            yield x[numbers], y[numbers]


def build(batches):
    x = torch.randn(SAMPLES, FEATURES)
    y = x.square().sum(1, keepdim=True)
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 1),
    ).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = batches(x, y, torch.Generator().manual_seed(1))

    def step():
        rows, targets = next(data)
        with mixed():
            loss = F.mse_loss(model(rows), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(faulty_batches)


def clean():
    return build(clean_batches)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
