"""A transformer over 160 meters forecasts their consumption. The dataset holds an opened .npz archive and
takes its windows out of archive["load"]; each such access reads and checks the whole array from the file
again, for every single window of the batch.
A good finding names the loader as what the step waits for, and the line of __getitem__ or its access.
"""

import os
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "each window is cut from archive[name], which reads the whole array from the .npz file again",
    "FIX": "read the array once in __init__ and cut the windows from it",
}
BATCH, HOURS, METERS = by_device(96, 40), by_device(3000, 9000), by_device(160, 20)
PAST, FUTURE = by_device(96, 48), by_device(24, 12)
WIDTH, HEADS, LAYERS = by_device(1024, 96), by_device(16, 4), by_device(4, 2)


class FromArchive(Dataset):
    def __init__(self, path):
        self.archive = np.load(path)

    def __len__(self):
        return HOURS - PAST - FUTURE

    def __getitem__(self, begin):
        window = self.archive["load"][begin : begin + PAST + FUTURE]  # guilty
        return torch.from_numpy(window)


class FromMemory(Dataset):
    def __init__(self, path):
        self.load = np.load(path)["load"]

    def __len__(self):
        return HOURS - PAST - FUTURE

    def __getitem__(self, begin):
        window = self.load[begin : begin + PAST + FUTURE]
        return torch.from_numpy(window)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(PAST, WIDTH), nn.Linear(WIDTH, FUTURE)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, past):
        meters = self.layers(self.enter(past.transpose(1, 2)))
        return self.leave(self.norm(meters)).transpose(1, 2)


def build(dataset):
    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, "meters.npz")
    np.savez(path, load=torch.randn(HOURS, METERS).numpy())
    windows = dataset(path)
    loader = DataLoader(windows, BATCH, shuffle=True, drop_last=True, pin_memory=device() == "cuda")
    model = Forecaster().to(device())
    optimizer = adamw(model)

    def endless():
        while folder:
            yield from loader

    data = endless()

    def step():
        series = next(data).to(device(), non_blocking=True)
        with mixed():
            loss = F.mse_loss(model(series[:, :PAST]).float(), series[:, PAST:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(FromArchive)


def clean():
    return build(FromMemory)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
