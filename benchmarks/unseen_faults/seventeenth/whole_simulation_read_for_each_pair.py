"""A convolutional surrogate learns to advance a flow by one moment. Each simulation is a .npy file of its
own, and a sample is two consecutive moments out of one. The data set calls np.load in __getitem__, which
reads the whole simulation from the file for each pair that is taken from it.
A good finding names the loader that the step waits for, and the np.load in __getitem__ by its line.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the data set reads the whole file of a simulation for each pair of moments",
    "FIX": "open the files once with mmap_mode='r' and copy only the pair",
}
BATCH, SIDE, CHANNELS = by_device(16, 4), by_device(128, 32), 3
SIMULATIONS, MOMENTS = by_device(6, 4), by_device(256, 4096)
WIDTH, LAYERS = by_device(192, 48), by_device(6, 3)


class Pairs(Dataset):
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name, f"run{number}.npy") for number in range(SIMULATIONS)]
        chance = np.random.default_rng(0)
        for file in self.files:
            np.save(file, chance.standard_normal((MOMENTS, CHANNELS, SIDE, SIDE), dtype=np.float32))

    def __len__(self):
        return SIMULATIONS * (MOMENTS - 1)

    def simulation(self, number):
        return np.load(self.files[number])  # guilty

    def __getitem__(self, index):
        number, moment = divmod(index, MOMENTS - 1)
        return torch.from_numpy(np.array(self.simulation(number)[moment : moment + 2]))


class MappedPairs(Pairs):
    def __init__(self):
        super().__init__()
        self.mapped = [np.load(file, mmap_mode="r") for file in self.files]

    def simulation(self, number):
        return self.mapped[number]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.second(F.gelu(self.first(x)))


class Surrogate(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Conv2d(WIDTH, CHANNELS, 1)

    def forward(self, fields):
        return fields + self.head(self.layers(self.stem(fields)))


def build(pairs):
    model = Surrogate().to(device(), memory_format=torch.channels_last)
    optimizer = adamw(model)
    loader = DataLoader(pairs, BATCH, shuffle=True, drop_last=True, pin_memory=device() == "cuda")

    def endless():
        while True:
            yield from loader

    data = endless()

    def step():
        now, then = next(data).to(device(), non_blocking=True).unbind(1)
        now = now.contiguous(memory_format=torch.channels_last)
        with mixed():
            loss = F.mse_loss(model(now), then)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Pairs())


def clean():
    return build(MappedPairs())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
