"""Crops of larger images, prepared by two workers of a DataLoader. Own loop."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import adamw, device, main, pick

FAULT = {
    "NAME": "augment_then_crop",
    "CAUSE": "The workers linearize and normalize the whole image and cut the crop out afterward, so most of the pixels they compute are thrown away and the step waits for them.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Crop the bytes first; everything else works pixel by pixel and commutes with it.",
    "STYLE": "loop",
    "WHY": "The step waits for the loader, whose workers spend their time on arithmetic over images of five times the crop's area; crop before converting.",
    "GAIN_MS": None,
}
BATCH, WHOLE, CROP = pick(64, 2), pick(288, 24), pick(128, 16)
CHANNELS, BLOCKS = pick(256, 8), pick(10, 1)
MEAN = np.array([0.2, 0.18, 0.15], np.float32).reshape(3, 1, 1)
SPREAD = np.array([0.23, 0.22, 0.22], np.float32).reshape(3, 1, 1)


def prepare(image):
    light = (image.astype(np.float32) / 255) ** np.float32(2.2)
    return (light - MEAN) / SPREAD


class Crops(Dataset):
    def __init__(self, crop_first):
        draw = np.random.default_rng(0)
        self.images = draw.integers(256, size=(64, 3, WHOLE, WHOLE), dtype=np.uint8)
        self.crop_first = crop_first

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        image, spare = self.images[index % 64], WHOLE - CROP
        rows = slice(index * 31 % spare, index * 31 % spare + CROP)
        columns = slice(index * 17 % spare, index * 17 % spare + CROP)
        if self.crop_first:
            image = prepare(image[:, rows, columns])
        else:
            image = prepare(image)[:, rows, columns].copy()  # FAULT
        return torch.from_numpy(image), index % 128


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 4, stride=4)
        self.body = nn.Sequential(*[Residual() for _ in range(BLOCKS)])
        self.head = nn.Linear(CHANNELS, 128)

    def forward(self, images):
        x = self.stem(images.contiguous(memory_format=torch.channels_last))
        return self.head(self.body(x).mean((2, 3)))


def make(crop_first):
    dev = device()
    torch.manual_seed(0)
    model = Network().to(dev, memory_format=torch.channels_last)
    optimizer = adamw(model)
    loader = DataLoader(
        Crops(crop_first),
        batch_size=BATCH,
        num_workers=2,
        prefetch_factor=4,
        pin_memory=dev == "cuda",
    )
    batches = iter(loader)

    def step():
        images, labels = next(batches)
        images = images.to(dev, non_blocking=True)
        labels = labels.to(dev, non_blocking=True)
        with torch.autocast(dev, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return make(crop_first=False)


def clean():
    return make(crop_first=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
