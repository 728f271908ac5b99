"""A series is cut into overlapping windows, one per time, and all of them are copied into one big
array beforehand: every value lies in memory once for each window that it is in.
A good finding names the array of all windows as what holds most of the memory, and the line that
makes it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "all overlapping windows of the series are copied, each value 128 times",
    "FIX": "keep the series and take the windows of a batch as views: series.unfold(0, WINDOW, 1)",
}
BATCH, WINDOW, CHANNELS, WIDTH = by_device(512, 256), 128, 8, by_device(2048, 768)
LENGTH = by_device(1_000_000, 40_000)


def faulty_windows(series):
    return torch.stack([series[i : i + WINDOW] for i in range(LENGTH - WINDOW)])  # guilty


def clean_windows(series):
    return series.unfold(0, WINDOW, 1)[: LENGTH - WINDOW].transpose(1, 2)


def build(windows):
    series = torch.randn(LENGTH, CHANNELS, device=device())
    all_windows = windows(series)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear((WINDOW - 1) * CHANNELS, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CHANNELS),
    ).to(device())
    optimizer = adamw(model)
    chance = torch.Generator(device()).manual_seed(1)

    def step():
        numbers = torch.randint(len(all_windows), (BATCH,), generator=chance, device=device())
        x = all_windows[numbers]
        with mixed():
            loss = F.mse_loss(model(x[:, :-1]), x[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(faulty_windows)


def clean():
    return build(clean_windows)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
