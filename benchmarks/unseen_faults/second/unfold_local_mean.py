"""A convolutional classifier with local contrast normalization."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "unfold_local_mean",
    "CAUSE": "The mean over each 5x5 neighborhood is taken of F.unfold, which writes every pixel 25 times.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "F.avg_pool2d(x, 5, stride=1, padding=2), which computes the same means and writes nothing else.",
    "STYLE": "factory",
    "BATCH": 32,
    "WHY": "F.unfold materializes 25 copies of the feature map, forward and backward, only to average them; an average pooling with stride 1 is the same sum without the copies.",
    "GAIN_MS": None,
}
SIDE, CHANNELS, CLASSES, BLOCKS = pick(64, 8), pick(256, 8), pick(128, 4), pick(6, 1)
NORMALIZED = pick(128, 4)


class Contrast(nn.Module):
    def __init__(self, unfolds):
        super().__init__()
        self.unfolds = unfolds
        self.inward = nn.Conv2d(CHANNELS, NORMALIZED, 1)
        self.outward = nn.Conv2d(NORMALIZED, CHANNELS, 1)

    def forward(self, x):
        y = self.inward(x)
        if self.unfolds:
            b, c, h, w = y.shape
            local = F.unfold(y, 5, padding=2).view(b, c, 25, h, w).mean(2)  # FAULT
        else:
            local = F.avg_pool2d(y, 5, stride=1, padding=2)
        return x + self.outward(F.relu(y - local))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class Classifier(nn.Module):
    def __init__(self, unfolds):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 2, stride=2)
        parts = [Contrast(unfolds)] + [Residual() for _ in range(BLOCKS)]
        self.body = nn.Sequential(*parts, Contrast(unfolds))
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, images):
        return self.head(self.body(self.stem(images)).mean((2, 3)))


def batches(size):
    ready = []
    for _ in range(4):
        images = torch.randn(size, 3, 2 * SIDE, 2 * SIDE, device=device())
        labels = torch.randint(CLASSES, (size,), device=device())
        ready.append((images.to(memory_format=torch.channels_last), labels))
    while True:
        yield from ready


def loss(model, batch):
    images, labels = batch
    with torch.autocast(images.device.type, torch.bfloat16):
        return F.cross_entropy(model(images), labels)


def make(unfolds):
    torch.manual_seed(0)
    model = Classifier(unfolds).to(memory_format=torch.channels_last)
    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    return make(unfolds=True)


def clean():
    return make(unfolds=False)
