"""A network for the transfer of style is trained toward the Gram matrices of a few paintings, as a
frozen feature network sees them. The paintings never change, and neither does the feature network,
but every step runs it on the paintings again. The Gram matrices can be computed once, before
the loop.
A good finding names the features of the fixed paintings computed in every step and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the frozen network computes the features of the same paintings in every step",
    "FIX": "compute the Gram matrices of the paintings once before the loop",
}
BATCH, SIDE, WIDTH = by_device(32, 8), by_device(256, 64), by_device(64, 8)
PAINTINGS, PAINTED = by_device(16, 8), by_device(512, 128)


def conv(before, after, stride=1):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1), nn.ReLU(inplace=True)
    )


class Features(nn.Module):
    """A frozen network with three stages."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(conv(3, WIDTH), conv(WIDTH, WIDTH)),
                nn.Sequential(conv(WIDTH, 2 * WIDTH, 2), conv(2 * WIDTH, 2 * WIDTH)),
                nn.Sequential(conv(2 * WIDTH, 4 * WIDTH, 2), conv(4 * WIDTH, 4 * WIDTH)),
            ]
        )
        for weight in self.parameters():
            if weight.dim() == 4:
                nn.init.kaiming_normal_(weight, nonlinearity="relu")
        self.requires_grad_(False)

    def forward(self, x):
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            conv(3, WIDTH, 2),
            conv(WIDTH, WIDTH),
            conv(WIDTH, WIDTH),
            nn.Conv2d(WIDTH, 12, 3, padding=1),
        )

    def forward(self, x):
        return x + F.pixel_shuffle(self.net(x), 2)


def grams(found):
    """Return the mean Gram matrix over the images of each stage, scaled by its size."""
    flat = [f.flatten(2) for f in found]
    return [(f @ f.mT).float().mean(0) / f.shape[2] for f in flat]


def build(once):
    layout = {"memory_format": torch.channels_last}
    painter, features = Painter().to(device(), **layout), Features().to(device(), **layout)
    if device() == "cuda":
        features.bfloat16()
    optimizer = adamw(painter)
    paintings = torch.randn(PAINTINGS, 3, PAINTED, PAINTED, device=device()).to(**layout)

    known = None
    if once:
        with torch.no_grad(), mixed():
            known = grams(features(paintings))
    data = in_turn(lambda: torch.randn(BATCH, 3, SIDE, SIDE, device=device()).to(**layout), 4)

    def step():
        images = next(data)
        targets = known
        if targets is None:
            with torch.no_grad(), mixed():
                targets = grams(features(paintings))  # guilty
        with mixed():
            with torch.no_grad():
                content = features(images)[-1]
            found = features(painter(images))
            loss = F.mse_loss(found[-1], content)
            for gram, target in zip(grams(found), targets, strict=True):
                loss = loss + F.mse_loss(gram, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(once=False)


def clean():
    return build(once=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
