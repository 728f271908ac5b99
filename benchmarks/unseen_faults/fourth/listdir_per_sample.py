"""The dataset finds the file of a sample by listing its folder and sorting the names, for every
sample that is fetched.
A good finding names the step's wait for data, or the listing of the folder, and the line that does
it.
"""

import os
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the folder of all samples is listed and sorted in __getitem__, once per sample",
    "FIX": "list it once, in __init__",
}
BATCH, SIDE, WIDTH = by_device(128, 12), 32, by_device(256, 40)
FILES = by_device(20_000, 2500)


class Listing(Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return FILES

    def __getitem__(self, index):
        name = sorted(os.listdir(self.folder.name))[index]  # guilty
        return self.load(name, index)

    def load(self, name, index):
        image = torch.from_numpy(np.fromfile(os.path.join(self.folder.name, name), np.uint8))
        return image, index % 10


class Listed(Listing):
    def __init__(self, folder):
        super().__init__(folder)
        self.names = sorted(os.listdir(folder.name))

    def __getitem__(self, index):
        return self.load(self.names[index], index)


def build(dataset):
    folder, chance = tempfile.TemporaryDirectory(), np.random.default_rng(0)
    for i in range(FILES):
        path = os.path.join(folder.name, f"{i:06d}.bin")
        chance.integers(256, size=3 * SIDE * SIDE, dtype=np.uint8).tofile(path)
    cuda = device() == "cuda"
    loader = DataLoader(
        dataset(folder),
        BATCH,
        drop_last=True,
        num_workers=8 if cuda else 0,
        persistent_workers=cuda,
        pin_memory=cuda,
    )
    batches = iter(b for _ in iter(int, 1) for b in loader)
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, 4 * WIDTH, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, 10),
    ).to(device(), memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        pixels, labels = (t.to(device(), non_blocking=True) for t in next(batches))
        images = pixels.view(BATCH, SIDE, SIDE, 3).permute(0, 3, 1, 2) / 255
        with mixed():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Listing)


def clean():
    return build(Listed)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
