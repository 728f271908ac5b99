"""Nodules in CT scans are segmented from random patches. The scans lie on disk as .npy files, and for each
patch np.load reads the whole scan, of which less than a hundredth is used; a memory map would read the patch.
A good finding names the loading of whole scans on the host (the wait for data) and the line that loads.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole scan is read from its file for every small patch",
    "FIX": "open the scans as memory maps, np.load(path, mmap_mode='r'), and read only the patch",
}
SCANS, DEPTH, SIDE = by_device(8, 6), by_device(128, 112), by_device(512, 256)
BATCH, PATCH, WIDTH = by_device(8, 5), by_device(64, 16), by_device(48, 16)


class NoduleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(1, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv3d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.head = nn.Conv3d(WIDTH, 1, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(x)


def read_whole(path):
    return np.load(path)  # guilty


def open_mapped(path):
    return np.load(path, mmap_mode="r")


def training(read):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    folder = tempfile.TemporaryDirectory()
    paths = [Path(folder.name) / f"scan{i}.npy" for i in range(SCANS)]
    for path in paths:
        np.save(path, rng.integers(-1000, 1000, (DEPTH, SIDE, SIDE), dtype=np.int16))
    model = NoduleNet().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def load_patch():
        scan = read(paths[rng.integers(SCANS)])
        z, y, x = (rng.integers(length - PATCH) for length in scan.shape)
        patch = np.array(scan[z : z + PATCH, y : y + PATCH, x : x + PATCH], dtype=np.float32)
        return torch.from_numpy(patch / 1000)

    def step(folder=folder):
        patches = torch.stack([load_patch() for _ in range(BATCH)]).to(device()).unsqueeze(1)
        nodules = (patches > 0.9).float()
        loss = F.binary_cross_entropy_with_logits(model(patches), nodules)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def faulty():
    return training(read_whole)


def clean():
    return training(open_mapped)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
