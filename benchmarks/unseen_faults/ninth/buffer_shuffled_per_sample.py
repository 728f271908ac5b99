"""A stream is shuffled with a buffer, and the whole buffer is shuffled again for every sample that
leaves it. To take one sample at random and put the next one in its place is enough. (The twins see
the samples in different random orders, so their losses differ a little.)
A good finding names the shuffling of the buffer, or the wait for data, and the line.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole shuffle buffer is shuffled again for every sample that is taken from it",
    "FIX": "take a random place of the buffer and put the next sample of the stream there",
}
BATCH, TIME, SERIES = by_device(512, 48), 96, by_device(256, 32)
WIDTH, BUFFER = by_device(1024, 64), 1000


class Stream(IterableDataset):
    """Windows of long series, in the order of time."""

    def __init__(self):
        made = torch.Generator().manual_seed(0)
        self.values = torch.randn(20_000, SERIES, generator=made).cumsum(0) / 50
        self.rng = random.Random(0)

    def windows(self):
        while True:
            for start in range(len(self.values) - TIME - 1):
                yield self.values[start : start + TIME + 1]


class Shuffled(Stream):
    def __iter__(self):
        buffer = []
        for window in self.windows():
            buffer.append(window)
            if len(buffer) >= BUFFER:
                self.rng.shuffle(buffer)  # guilty
                yield buffer.pop()


class Exchanged(Stream):
    def __iter__(self):
        buffer = []
        for window in self.windows():
            if len(buffer) < BUFFER:
                buffer.append(window)
                continue
            place = self.rng.randrange(BUFFER)
            yield buffer[place]
            buffer[place] = window


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(SERIES, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, SERIES)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def prepare(kind):
    model = Forecaster().to(device())
    data = iter(DataLoader(kind(), BATCH, pin_memory=device() == "cuda"))
    optimizer = adamw(model)

    def step():
        x = next(data).to(device(), non_blocking=True)
        with mixed():
            loss = F.mse_loss(model(x[:, :-1]), x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return prepare(Shuffled)


def clean():
    return prepare(Exchanged)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
