"""The mask branch of an instance segmenter: features of each region, two convolutions, and a mask
per class. The loss looks only at the mask of the region's true class, which is known, but the masks
of all 200 classes are computed.
A good finding names the masks of the other classes, which are computed and not used.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "masks of all 200 classes are computed although the loss uses that of the true class",
    "FIX": "take the weights of the region's class first and compute only its mask",
}
REGIONS, SIDE, CHANNELS, CLASSES = by_device(256, 52), by_device(28, 20), by_device(256, 32), 200


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            nn.ReLU(),
        )
        self.masks = nn.Conv2d(CHANNELS, CLASSES, 1)

    def forward(self, features, classes):
        h = self.layers(features)
        rows = torch.arange(len(h), device=h.device)
        return self.masks(h)[rows, classes]  # guilty


class OneMask(Branch):
    def forward(self, features, classes):
        h = self.layers(features)
        weight = self.masks.weight[classes].view(-1, 1, CHANNELS)
        bias = self.masks.bias[classes].view(-1, 1, 1)
        return torch.baddbmm(bias, weight, h.flatten(2)).view(-1, SIDE, SIDE)


def build(kind):
    model = kind().to(device())
    optimizer = adamw(model)
    shape = (SIDE, SIDE)
    data = in_turn(
        lambda: (
            torch.randn(REGIONS, CHANNELS, *shape, device=device()),
            torch.randint(CLASSES, (REGIONS,), device=device()),
            torch.randint(2, (REGIONS, *shape), device=device()).float(),
        )
    )

    def step():
        features, classes, truth = next(data)
        with mixed():
            masks = model(features, classes)
        loss = F.binary_cross_entropy_with_logits(masks.float(), truth)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Branch)


def clean():
    return build(OneMask)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
