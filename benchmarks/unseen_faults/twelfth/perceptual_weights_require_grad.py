"""Super-resolution with a perceptual loss: features of the result and the true image are compared
in a fixed VGG. Its weights were never frozen, so the backward computes gradients for them.
A good finding names the loss network's gradients that nobody uses, and the line that makes it.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the loss network's weights require gradients, which are computed and used by nobody",
    "FIX": "call requires_grad_(False) on the loss network",
}
BATCH, SIDE = by_device(16, 2), by_device(64, 32)
WIDTH, FEATURES = by_device(64, 24), by_device(64, 24)


class Upscaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(4))
        self.last = nn.Conv2d(WIDTH, 12, 3, padding=1)

    def forward(self, small):
        x = F.relu(self.first(small))
        for conv in self.body:
            x = x + F.relu(conv(x))
        return F.pixel_shuffle(self.last(x), 2)


def vgg():
    return nn.Sequential(
        nn.Conv2d(3, FEATURES, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(FEATURES, FEATURES, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(FEATURES, 2 * FEATURES, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * FEATURES, 2 * FEATURES, 3, padding=1),
        nn.ReLU(),
    ).to(device())


def prepare():
    model = Upscaler().to(device())
    data = in_turn(
        lambda: (
            torch.rand(BATCH, 3, SIDE, SIDE, device=device()),
            torch.rand(BATCH, 3, 2 * SIDE, 2 * SIDE, device=device()),
        )
    )
    return model, adamw(model), data


def learn(model, features, optimizer, small, large):
    with mixed():
        result = model(small)
        likeness = F.mse_loss(features(result).float(), features(large).float())
    loss = F.l1_loss(result.float(), large) + 0.1 * likeness
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()
    features = vgg().eval()  # guilty

    def step():
        return learn(model, features, optimizer, *next(data))

    return step


def clean():
    model, optimizer, data = prepare()
    features = vgg().eval().requires_grad_(False)

    def step():
        return learn(model, features, optimizer, *next(data))

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
