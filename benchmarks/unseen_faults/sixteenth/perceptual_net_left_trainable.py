"""A super-resolution network is trained with a perceptual loss: features of a pretrained network of the
enlarged and of the true image are compared. The feature network was put into eval mode, which people
take for freezing it; its parameters still require gradients, so each backward pass computes them.
A good finding names the weight gradients of the feature network, which no optimizer uses (parameters
not frozen), and the line where the network is made, or its call in the loss.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the feature network of the perceptual loss is not frozen: its weight gradients are computed",
    "FIX": "requires_grad_(False) on the feature network",
}
BATCH, SIDE = by_device(32, 2), by_device(48, 16)
WIDTH, LAYERS, FEATURES = by_device(64, 16), by_device(8, 2), by_device(64, 32)


class Enlarger(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(LAYERS))
        self.end = nn.Conv2d(WIDTH, 3 * 4 * 4, 3, padding=1)

    def forward(self, small):
        x = self.start(small)
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return F.pixel_shuffle(self.end(x), 4)


class FeatureNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, FEATURES, FEATURES, 2 * FEATURES, 2 * FEATURES, 4 * FEATURES]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in zip(widths, widths[1:], strict=False)
        )

    def forward(self, x):
        for i, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            if i in (1, 3):
                x = F.max_pool2d(x, 2)
        return x


def judge():
    return FeatureNet().to(device()).eval()  # guilty


def frozen_judge():
    return FeatureNet().to(device()).eval().requires_grad_(False)


def build(make_features):
    model, features = Enlarger().to(device()), make_features()
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.rand(BATCH, 3, SIDE, SIDE, device=device()),
            torch.rand(BATCH, 3, 4 * SIDE, 4 * SIDE, device=device()),
        )
    )

    def step():
        small, large = next(data)
        with mixed():
            with torch.no_grad():
                wanted = features(large)
            made = model(small)
            loss = F.l1_loss(made, large) + 0.1 * F.mse_loss(features(made), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(judge)


def clean():
    return build(frozen_judge)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
