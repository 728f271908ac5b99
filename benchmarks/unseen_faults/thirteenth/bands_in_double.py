"""Tiles of a satellite image have bands of 16-bit integers. For every batch they are scaled and
normalized on the host with numpy: an integer array divided by a Python float is float64, so three
passes run in double precision over the whole batch, a fourth casts it to fp32, and twice the bytes
of the tiles are copied to the device. Copied as the integers that they are, the tiles are
normalized on the device in a moment.
A good finding names the normalization on the host (in float64) and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the 16-bit bands of each batch are normalized on the host by numpy in float64",
    "FIX": "copy the integers to the device and normalize them there in fp32",
}
TILES, BANDS, SIDE = by_device(256, 128), 6, 96
BATCH, WIDTH, LAYERS, CLASSES = 64, by_device(192, 8), by_device(8, 1), 10
STRIDE = by_device(2, 8)
MEAN, STD = [0.12, 0.11, 0.13, 0.25, 0.22, 0.16], [0.05, 0.05, 0.06, 0.09, 0.08, 0.07]


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
            nn.BatchNorm2d(WIDTH),
        )

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(BANDS, WIDTH, STRIDE, stride=STRIDE)
        self.units = nn.Sequential(*[Unit() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.units(self.stem(x)).mean((2, 3)))


def to_device(array):
    value = torch.from_numpy(array)
    return value.pin_memory().to("cuda", non_blocking=True) if device() == "cuda" else value


def on_host():
    mean, std = np.array(MEAN)[:, None, None], np.array(STD)[:, None, None]

    def prepare(tiles):
        tiles = (tiles / 10000.0 - mean) / std  # guilty
        return to_device(tiles.astype(np.float32))

    return prepare


def on_device():
    scale = 1 / (10000 * torch.tensor(STD, device=device()))[:, None, None]
    shift = torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)], device=device())
    shift = shift[:, None, None]

    def prepare(tiles):
        return torch.addcmul(shift, to_device(tiles).float(), scale)

    return prepare


def build(way):
    model = Net().to(device(), memory_format=torch.channels_last)
    optimizer, prepare = adamw(model), way()
    rng = np.random.default_rng(0)
    tiles = rng.integers(10000, size=(TILES, BANDS, SIDE, SIDE), dtype=np.int16)
    labels = torch.randint(CLASSES, (TILES,), device=device())

    def step():
        chosen = rng.integers(TILES, size=BATCH)
        x = prepare(tiles[chosen]).to(memory_format=torch.channels_last)
        target = labels[to_device(chosen)]
        with mixed():
            loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(on_host)


def clean():
    return build(on_device)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
