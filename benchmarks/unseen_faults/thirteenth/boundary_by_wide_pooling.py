"""A segmentation network gives pixels near the boundary of a region more weight. The boundary is widened
by max_pool2d with one wide square window, which looks at every pixel of the square for every
pixel of the image. The maximum over a square is the maximum over its rows of the maximum over its
columns: two narrow windows give the same.
A good finding names the max pooling with the wide window and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 4,
    "CAUSE": "the boundary is widened by max_pool2d with a wide square window, which is separable",
    "FIX": "pool along the rows and then along the columns",
}
SIDE, WINDOW, CLASSES = by_device(512, 128), by_device(63, 15), 8
WIDTH, LAYERS = by_device(64, 8), by_device(4, 2)


def unit(before, after, stride=1):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = unit(3, WIDTH, 2)
        self.units = nn.Sequential(*[unit(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.deep = nn.Sequential(unit(WIDTH, 2 * WIDTH, 2), unit(2 * WIDTH, 2 * WIDTH))
        self.up = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, stride=2)
        self.head = nn.Conv2d(WIDTH, 4 * CLASSES, 1)

    def forward(self, x):
        x = self.units(self.stem(x))
        return F.pixel_shuffle(self.head(x + self.up(self.deep(x))), 2)


def square(edge):
    return F.max_pool2d(edge, WINDOW, stride=1, padding=WINDOW // 2)  # guilty


def separate(edge):
    rows = F.max_pool2d(edge, (1, WINDOW), stride=1, padding=(0, WINDOW // 2))
    return F.max_pool2d(rows, (WINDOW, 1), stride=1, padding=(WINDOW // 2, 0))


def build(widen):
    my_turn()

    def batch(size):
        images = torch.randn(size, 3, SIDE, SIDE, device=device())
        regions = torch.randint(CLASSES, (size, SIDE // 64, SIDE // 64), device=device())
        regions = regions.repeat_interleave(64, 1).repeat_interleave(64, 2)
        return images.to(memory_format=torch.channels_last), regions

    def weights(regions):
        """Return 5 near a boundary and 1 elsewhere."""
        edge = torch.zeros(regions.shape, device=regions.device)
        edge[:, 1:] = regions[:, 1:] != regions[:, :-1]
        edge[:, :, 1:].logical_or_(regions[:, :, 1:] != regions[:, :, :-1])
        return 1 + 4 * widen(edge[:, None])[:, 0]

    def loss(model, pair):
        images, regions = pair
        weight = weights(regions)
        with mixed():
            losses = F.cross_entropy(model(images), regions, reduction="none")
        return (losses * weight).sum() / weight.sum()

    model = Segmenter().to(memory_format=torch.channels_last)
    return steplab.UserModel(
        model, lambda size: in_turn(lambda: batch(size), 4), loss, unit="images"
    )


def faulty():
    return build(square)


def clean():
    return build(separate)
