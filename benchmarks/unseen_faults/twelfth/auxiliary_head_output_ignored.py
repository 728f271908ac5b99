"""Segmentation of street scenes: a small convolutional network with an auxiliary head on its middle
stage, as the library builds it. The loss takes only the main output; the auxiliary one is dropped.
A good finding names the auxiliary head whose output nothing uses, and the line that runs it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the auxiliary head runs and is upsampled in every forward although no loss uses it",
    "FIX": "build the model without the auxiliary head, or do not run it",
}
BATCH, SIDE, CLASSES, WIDTH = by_device(16, 2), by_device(256, 128), 19, by_device(128, 32)


def unit(inside, outside, stride=1):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.GroupNorm(8, outside), nn.ReLU()
    )


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.early = nn.Sequential(unit(3, WIDTH, 2), unit(WIDTH, 2 * WIDTH, 2))
        self.late = nn.Sequential(unit(2 * WIDTH, 2 * WIDTH, 2), unit(2 * WIDTH, 2 * WIDTH))
        self.head = nn.Sequential(unit(2 * WIDTH, WIDTH), nn.Conv2d(WIDTH, CLASSES, 1))
        self.auxiliary = None

    def add_auxiliary(self):
        wide = 4 * WIDTH
        self.auxiliary = nn.Sequential(unit(2 * WIDTH, wide), nn.Conv2d(wide, CLASSES, 1))

    def forward(self, images):
        size = images.shape[-2:]
        middle = self.early(images)
        scores = self.head(self.late(middle))
        results = {"out": F.interpolate(scores, size, mode="bilinear")}
        if self.auxiliary is not None:
            scores = self.auxiliary(middle)  # guilty
            results["aux"] = F.interpolate(scores, size, mode="bilinear")
        return results


def training(auxiliary):
    model = Segmenter()
    data = in_turn(
        lambda: (
            torch.rand(BATCH, 3, SIDE, SIDE, device=device()),
            torch.randint(CLASSES, (BATCH, SIDE, SIDE), device=device()),
        )
    )
    if auxiliary:
        model.add_auxiliary()
    model = model.to(device())
    optimizer = adamw(model)

    def step():
        images, labels = next(data)
        with mixed():
            results = model(images)
        loss = F.cross_entropy(results["out"].float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(auxiliary=True)


def clean():
    return training(auxiliary=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
