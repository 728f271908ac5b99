"""A dataset of windows of a long series normalizes each window by the mean and the deviation of the
series, which __getitem__ computes from the whole series again for every sample.
A good finding names the step's wait for the batch, or the means over the whole series, and the line
that computes them.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "mean and deviation of the whole series are computed again for every sample",
    "FIX": "compute them once in __init__",
}
BATCH, WINDOW, SENSORS, WIDTH = by_device(64, 16), 96, 16, by_device(4096, 1536)
POINTS, AHEAD = by_device(200_000, 8_000), 8


class Windows(Dataset):
    def __init__(self, series):
        self.series = series

    def __len__(self):
        return len(self.series) - WINDOW - AHEAD + 1


class FaultyWindows(Windows):
    def __getitem__(self, i):
        deviation, mean = torch.std_mean(self.series, 0)  # guilty
        part = (self.series[i : i + WINDOW + AHEAD] - mean) / deviation
        return part[:WINDOW], part[WINDOW:]


class CleanWindows(Windows):
    def __init__(self, series):
        deviation, mean = torch.std_mean(series, 0)
        super().__init__((series - mean) / deviation)

    def __getitem__(self, i):
        part = self.series[i : i + WINDOW + AHEAD]
        return part[:WINDOW], part[WINDOW:]


def forever(loader):
    while True:
        yield from loader


def build(windows):
    data = windows(torch.randn(POINTS, SENSORS).cumsum(0))
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(WINDOW * SENSORS, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, AHEAD * SENSORS),
    ).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    chance = torch.Generator().manual_seed(1)
    batches = forever(DataLoader(data, BATCH, shuffle=True, drop_last=True, generator=chance))

    def step():
        past, future = (t.to(device()) for t in next(batches))
        with mixed():
            loss = F.mse_loss(model(past), future.flatten(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(FaultyWindows)


def clean():
    return build(CleanWindows)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
