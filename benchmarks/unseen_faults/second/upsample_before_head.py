"""Semantic segmentation: features at a quarter of the resolution, and a 1x1 classifier."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "upsample_before_head",
    "CAUSE": "256 feature channels are interpolated to the full resolution before the 1x1 convolution that turns them into 32 classes.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Classify at the low resolution and interpolate the 32 logits: bilinear interpolation and a 1x1 convolution commute.",
    "STYLE": "factory",
    "BATCH": 16,
    "WHY": "The interpolation of 256 channels to 16 times the pixels, and the 1x1 convolution there, move 8 times the bytes that interpolating the logits would; the two linear maps commute.",
    "GAIN_MS": None,
}
SIDE, CHANNELS, CLASSES = pick(256, 16), pick(256, 8), pick(32, 4)
BLOCKS = pick(7, 1)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class Segmenter(nn.Module):
    def __init__(self, upsample_first):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 4, stride=4)
        self.blocks = nn.Sequential(*[Residual() for _ in range(BLOCKS)])
        self.classify = nn.Conv2d(CHANNELS, CLASSES, 1)
        self.upsample_first = upsample_first

    def forward(self, images):
        x = self.blocks(self.stem(images))
        if self.upsample_first:
            x = F.interpolate(x, scale_factor=4, mode="bilinear")  # FAULT
            return self.classify(x)
        return F.interpolate(self.classify(x), scale_factor=4, mode="bilinear")


def batches(size):
    ready = []
    for _ in range(4):
        images = torch.randn(size, 3, SIDE, SIDE, device=device())
        labels = torch.randint(CLASSES, (size, SIDE, SIDE), device=device())
        ready.append((images.to(memory_format=torch.channels_last), labels))
    while True:
        yield from ready


def loss(model, batch):
    images, labels = batch
    with torch.autocast(images.device.type, torch.bfloat16):
        logits = model(images).permute(0, 2, 3, 1)
        return F.cross_entropy(logits.reshape(-1, CLASSES), labels.flatten())


def make(upsample_first):
    torch.manual_seed(0)
    model = Segmenter(upsample_first).to(memory_format=torch.channels_last)
    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    return make(upsample_first=True)


def clean():
    return make(upsample_first=False)
