"""A network for street scenes brings its features back to the size of the image with a bilinear
upsampling and then classifies every pixel with a 1x1 convolution. The two commute: the convolution
mixes channels within a pixel and the weights of the interpolation sum to one. Classified first,
only one map per class is upsampled instead of all the features.
A good finding names the upsampling of the wide features (or the 1x1 convolution at full size after
it) and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "all feature channels are upsampled to full size before a 1x1 convolution makes few classes of them",
    "FIX": "apply the 1x1 convolution at the low resolution and upsample its classes",
    "BATCH": 16,
    "CPU_BATCH": 4,
}
SIDE, WIDTH, CLASSES = by_device(512, 96), by_device(128, 48), 8


def conv(before, after, stride=1):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class Segmenter(nn.Module):
    def __init__(self, classify_first):
        super().__init__()
        self.classify_first = classify_first
        self.encoder = nn.Sequential(
            conv(3, WIDTH // 2, 2),
            conv(WIDTH // 2, WIDTH, 2),
            conv(WIDTH, WIDTH),
            conv(WIDTH, WIDTH),
        )
        self.classes = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, images):
        x = self.encoder(images)
        size = images.shape[-2:]
        if self.classify_first:
            return F.interpolate(self.classes(x), size=size, mode="bilinear")
        x = F.interpolate(x, size=size, mode="bilinear")  # guilty
        return self.classes(x)


def build(classify_first):
    import steplab

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, SIDE, SIDE).to(memory_format=torch.channels_last),
                torch.randint(CLASSES, (size, SIDE, SIDE)),
            ),
            4,
        )

    def loss(model, batch):
        images, labels = batch
        with mixed():
            return F.cross_entropy(model(images), labels)

    model = Segmenter(classify_first).to(memory_format=torch.channels_last)
    return steplab.UserModel(model, batches, loss, optimizer=adamw)


def faulty():
    return build(classify_first=False)


def clean():
    return build(classify_first=True)
