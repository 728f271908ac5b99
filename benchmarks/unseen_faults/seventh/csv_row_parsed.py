"""The dataset keeps the lines of a CSV file as text and turns each into numbers when its sample is
asked for, in every epoch anew.
A good finding names the step's wait for its batch, and the line that parses the numbers.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the text of every row is split and converted to floats in __getitem__, again in every epoch",
    "FIX": "parse the file once, into a tensor",
}
BATCH, FEATURES, ROWS = by_device(1024, 256), 100, by_device(16_384, 4096)
WIDTH = by_device(4096, 768)


class Lines(Dataset):
    def __init__(self, lines):
        self.lines = lines

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        values = [float(v) for v in self.lines[i].split(",")]  # guilty
        return torch.tensor(values)


class Parsed(Lines):
    def __init__(self, lines):
        super().__init__(lines)
        self.values = torch.tensor([[float(v) for v in line.split(",")] for line in lines])

    def __getitem__(self, i):
        return self.values[i]


def read():
    chance = random.Random(0)
    return [",".join(f"{chance.gauss(0, 1):.6f}" for _ in range(FEATURES + 1)) for _ in range(ROWS)]


def forever(loader):
    while True:
        yield from loader


def build(dataset):
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 1),
    ).to(device())
    optimizer = adamw(model)
    batches = forever(DataLoader(dataset(read()), BATCH, drop_last=True))

    def step():
        rows = next(batches).to(device())
        with mixed():
            loss = F.mse_loss(model(rows[:, :-1]), rows[:, -1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Lines)


def clean():
    return build(Parsed)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
