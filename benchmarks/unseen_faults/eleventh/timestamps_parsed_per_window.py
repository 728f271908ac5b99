"""A forecaster of hourly load sees windows of the series with the calendar (hour, weekday, day of the
month, month) of each of their points. The time stamps are text, and every window parses its own.
A good finding names the parsing of time stamps in every step, and the line that calls strptime.
"""

from datetime import datetime, timedelta

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the time stamps of every window are parsed with strptime in the dataset, again for every sample",
    "FIX": "compute the calendar features of the whole series once, when the dataset is made",
}
BATCH, PAST, FUTURE, POINTS = by_device(256, 24), 96, 24, 8760
WIDTH = by_device(1024, 768)


def calendar(stamps):
    times = [datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S") for stamp in stamps]
    rows = [(t.hour / 23, t.weekday() / 6, t.day / 31, t.month / 12) for t in times]
    return np.array(rows, dtype=np.float32)


class Windows:
    def __init__(self):
        rng = np.random.default_rng(0)
        start = datetime(2023, 1, 1)
        self.load = np.cumsum(rng.standard_normal(POINTS), dtype=np.float32) * 0.05
        self.stamps = [str(start + timedelta(hours=i)) for i in range(POINTS)]

    def __getitem__(self, i):
        past, future = slice(i, i + PAST), slice(i + PAST, i + PAST + FUTURE)
        marks = calendar(self.stamps[past])  # guilty
        return np.concatenate([self.load[past, None], marks], 1), self.load[future]


class WindowsWithCalendar(Windows):
    def __init__(self):
        super().__init__()
        self.marks = calendar(self.stamps)

    def __getitem__(self, i):
        past, future = slice(i, i + PAST), slice(i + PAST, i + PAST + FUTURE)
        return np.concatenate([self.load[past, None], self.marks[past]], 1), self.load[future]


def training(windows):
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(PAST * 5, WIDTH * 2),
        nn.GELU(),
        nn.Linear(WIDTH * 2, WIDTH * 2),
        nn.GELU(),
        nn.Linear(WIDTH * 2, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, FUTURE),
    ).to(device())
    optimizer = adamw(model)

    def step():
        samples = [windows[i] for i in rng.integers(POINTS - PAST - FUTURE, size=BATCH)]
        x, y = (
            torch.from_numpy(np.stack(part)).to(device()) for part in zip(*samples, strict=True)
        )
        with mixed():
            forecast = model(x)
        loss = F.mse_loss(forecast.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(Windows())


def clean():
    return training(WindowsWithCalendar())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
