"""An image classifier is trained on random crops of larger photos, held as bytes. The dataset turns the
whole photo into floats and normalizes it before it cuts out the small square that is trained on, as
transforms are often chained; most of the converted pixels are thrown away.
A good finding names the conversion and normalization of the whole photo before the crop, in the data
loading, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the dataset converts and normalizes the whole photo, then crops a small part of it",
    "FIX": "crop the bytes first, then convert and normalize the crop",
}
BATCH, PHOTO, CROP = by_device(256, 16), by_device(640, 384), by_device(160, 64)
PHOTOS, CLASSES, WIDTH = by_device(256, 64), by_device(1000, 20), by_device(64, 32)
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def cut(photo, y, x):
    return photo[:, y : y + CROP, x : x + CROP]


def normalize_then_crop(photo, y, x):
    return cut((photo.float() / 255 - MEAN) / STD, y, x)  # guilty


def crop_then_normalize(photo, y, x):
    return (cut(photo, y, x).float() / 255 - MEAN) / STD


class Photos(Dataset):
    def __init__(self, prepare):
        self.prepare = prepare
        self.photos = torch.randint(256, (PHOTOS, 3, PHOTO, PHOTO), dtype=torch.uint8)
        self.labels = torch.randint(CLASSES, (PHOTOS,))

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, index):
        y, x = torch.randint(PHOTO - CROP + 1, (2,)).tolist()
        return self.prepare(self.photos[index], y, x), self.labels[index]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, WIDTH, 2 * WIDTH, 4 * WIDTH]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, 2, 1) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.body = nn.ModuleList(nn.Conv2d(4 * WIDTH, 4 * WIDTH, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x):
        for conv in self.convs:
            x = F.relu(conv(x))
        for conv in self.body:
            x = x + F.relu(conv(x))
        return self.head(x.mean((2, 3)))


def build(prepare):
    model = Classifier().to(device())
    optimizer = adamw(model)
    photos, workers = Photos(prepare), by_device(12, 0)
    sampler = RandomSampler(photos, replacement=True, num_samples=1_000_000)
    data = iter(
        DataLoader(
            photos, BATCH, sampler=sampler, num_workers=workers, pin_memory=device() == "cuda"
        )
    )

    def step():
        images, labels = (part.to(device(), non_blocking=True) for part in next(data))
        with mixed():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(normalize_then_crop)


def clean():
    return build(crop_then_normalize)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
