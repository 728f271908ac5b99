"""The photos lie on the disk as they came from the camera. The dataset decodes each of them in full
and shrinks it to the small size of the network, again in every epoch.
A good finding names the step's wait for its batch, and the line that decodes or resizes.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "full-size images are decoded and shrunk in __getitem__, again in every epoch",
    "FIX": "shrink all images once, before the training, and load the small ones",
}
BATCH, SIZE, LARGE, WIDTH = by_device(64, 24), 32, by_device(512, 192), by_device(256, 36)
PHOTOS, CLASSES = by_device(512, 128), 10


class Photos(Dataset):
    def __init__(self, folder):
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        image = Image.open(self.paths[i]).resize((SIZE, SIZE), Image.Resampling.BICUBIC)  # guilty
        return torch.from_numpy(np.array(image)), i % CLASSES


class Shrunk(Photos):
    def __init__(self, folder):
        super().__init__(folder)
        images = (Image.open(path) for path in self.paths)
        small = [np.array(i.resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for i in images]
        self.small = torch.from_numpy(np.stack(small))

    def __getitem__(self, i):
        return self.small[i], i % CLASSES


def photos():
    folder, chance = Path(tempfile.mkdtemp()), np.random.default_rng(0)
    for i in range(PHOTOS):
        coarse = chance.integers(256, size=(8, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((LARGE, LARGE)).save(folder / f"{i:05}.jpg")
    return folder


def forever(loader):
    while True:
        yield from loader


def build(dataset):
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, 1, 1),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, 4 * WIDTH, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * WIDTH * 64, CLASSES),
    ).to(device())
    optimizer = adamw(model)
    batches = forever(DataLoader(dataset(photos()), BATCH, drop_last=True))

    def step():
        images, labels = (t.to(device()) for t in next(batches))
        with mixed():
            x = images.permute(0, 3, 1, 2).float() / 255
            loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Photos)


def clean():
    return build(Shrunk)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
