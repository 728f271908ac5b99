"""The label images of a scene dataset have raw numbers that must be mapped to training
classes. The dataset does so with one comparison and one assignment of the whole image per number.
A good finding names the step's wait for its batch, and the line that assigns under the mask.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "labels are mapped with a mask of the whole image for each of 182 raw numbers",
    "FIX": "one lookup in a table: TABLE[label]",
}
BATCH, SIZE, WIDTH = by_device(16, 4), by_device(512, 128), by_device(64, 16)
IMAGES, RAW, CLASSES = by_device(64, 32), 182, 8
MAPPING = {raw: raw * 7 % CLASSES for raw in range(RAW)}
TABLE = np.array([MAPPING[raw] for raw in range(RAW)])


class Scenes(Dataset):
    def __init__(self):
        self.images = torch.randn(IMAGES, 3, SIZE, SIZE)
        shape = (IMAGES, SIZE, SIZE)
        self.labels = np.random.default_rng(0).integers(RAW, size=shape, dtype=np.uint8)

    def __len__(self):
        return IMAGES

    def __getitem__(self, i):
        return self.images[i], torch.from_numpy(self.mapped(self.labels[i]))


class ByMask(Scenes):
    def mapped(self, label):
        mapped = np.zeros(label.shape, dtype=np.int64)
        for raw, number in MAPPING.items():
            mapped[label == raw] = number  # guilty
        return mapped


class ByTable(Scenes):
    def mapped(self, label):
        return TABLE[label]


def forever(loader):
    while True:
        yield from loader


def build(dataset):
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, 4 * CLASSES, 1),
        nn.PixelShuffle(2),
    ).to(device())
    optimizer = adamw(model)
    batches = forever(DataLoader(dataset(), BATCH, drop_last=True))

    def step():
        images, labels = (t.to(device()) for t in next(batches))
        with mixed():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(ByMask)


def clean():
    return build(ByTable)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
