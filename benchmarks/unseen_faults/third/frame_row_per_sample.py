"""The dataset keeps a pandas frame and takes one row of it by iloc for every sample.
A good finding names the wait for data that Python spends in pandas, and the line with iloc.
"""

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "every sample is a row taken from a pandas frame by iloc, a new Series of objects each time",
    "FIX": "turn the columns into one array when the dataset is made, and index it by batch",
}
BATCH, WIDTH, ROWS, COLUMNS = by_device(1024, 128), by_device(4096, 1536), 20_000, 40
NAMES = [f"x{i}" for i in range(COLUMNS)]


def table():
    chance = np.random.default_rng(0)
    frame = pd.DataFrame(chance.standard_normal((ROWS, COLUMNS)), columns=NAMES)
    frame["label"] = (frame["x0"] > 0).astype(int)
    return frame


class Rows(Dataset):
    def __init__(self, frame):
        self.frame = frame

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, index):
        row = self.frame.iloc[index]  # guilty
        return torch.tensor(row[NAMES].values, dtype=torch.float32), int(row["label"])


class Arrays(Dataset):
    def __init__(self, frame):
        self.x = torch.from_numpy(frame[NAMES].to_numpy("float32"))
        self.y = torch.from_numpy(frame["label"].to_numpy("int64"))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, indices):
        return self.x[indices], self.y[indices]


def endless(loader):
    while True:
        yield from loader


def build(loader):
    model = nn.Sequential(
        nn.Linear(COLUMNS, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 2),
    ).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = endless(loader)

    def step():
        x, y = next(data)
        x, y = x.to(device()), y.to(device())
        optimizer.zero_grad()
        with mixed():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return build(DataLoader(Rows(table()), batch_size=BATCH, shuffle=True, drop_last=True))


def clean():
    data = Arrays(table())
    sampler = BatchSampler(RandomSampler(data), BATCH, drop_last=True)
    return build(DataLoader(data, sampler=sampler, batch_size=None))


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
