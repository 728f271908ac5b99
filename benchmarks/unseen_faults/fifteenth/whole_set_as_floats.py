"""A small data set of images is held on the device, which spares the loader. It is normalized at once,
as floats: four bytes where the pixel has one, and the device holds that for the whole training.
Bytes can be kept and the batch normalized when it is taken, which costs next to nothing.
A good finding names the data set that lies in memory as floats and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the whole data set lies on the device as normalized floats instead of bytes",
    "FIX": "keep the images as uint8 and normalize each batch",
}
IMAGES, SIDE, BATCH = by_device(500_000, 6000), by_device(64, 32), by_device(512, 64)
WIDTH, STAGES, CLASSES = by_device(64, 24), 3, 200
MEAN, STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)


class Stage(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(x)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3] + [WIDTH * 2**stage for stage in range(STAGES)]
        self.stages = nn.Sequential(*map(Stage, widths[:-1], widths[1:]))
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, images):
        return self.head(self.stages(images).mean((2, 3)))


class Images:
    def __init__(self, as_floats):
        raw = torch.randint(256, (IMAGES, 3, SIDE, SIDE), dtype=torch.uint8, device=device())
        self.labels = torch.randint(CLASSES, (IMAGES,), device=device())
        self.mean = torch.tensor(MEAN, device=device()).view(3, 1, 1)
        self.std = torch.tensor(STD, device=device()).view(3, 1, 1)
        self.as_floats = as_floats
        if as_floats:
            self.images = self.normalized(raw)  # guilty
        else:
            self.images = raw

    def normalized(self, images):
        return images.float().sub_(self.mean).div_(self.std)

    def batches(self):
        while True:
            for rows in torch.randperm(IMAGES, device=device()).split(BATCH)[: IMAGES // BATCH]:
                images = self.images[rows]
                if not self.as_floats:
                    images = self.normalized(images)
                yield images.to(memory_format=torch.channels_last), self.labels[rows]


def build(as_floats):
    model = Classifier().to(device(), memory_format=torch.channels_last)
    optimizer = adamw(model)
    data = Images(as_floats).batches()

    def step():
        images, labels = next(data)
        with mixed():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return build(as_floats=True)


def clean():
    return build(as_floats=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
