"""Gaussian noise on the activations was switched off by setting its deviation to 0.0, but the layer
still draws a normal number for every activation, multiplies it by zero and adds it.
A good finding names the noise that changes nothing (drawing it, or the product with zero), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "noise of deviation 0 is still drawn for every activation and added",
    "FIX": "return x as it is if the deviation is 0",
}
BATCH, CHANNELS, LENGTH = by_device(256, 40), by_device(256, 32), by_device(2048, 512)
LAYERS, LEADS, CLASSES = 4, 12, 9
NOISE = 0.0


class AlwaysNoise(nn.Module):
    def __init__(self, std):
        super().__init__()
        self.std = std

    def forward(self, x):
        if self.training:
            x = x + torch.randn_like(x) * self.std  # guilty
        return x


class Noise(AlwaysNoise):
    def forward(self, x):
        if self.training and self.std > 0:
            x = x + torch.randn_like(x) * self.std
        return x


def ecg_net(noise):
    layers = [nn.Conv1d(LEADS, CHANNELS, 7, padding=3)]
    for _ in range(LAYERS):
        layers += [noise(NOISE), nn.ReLU(), nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)]
    layers += [nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES)]
    return nn.Sequential(*layers)


def prepare(noise):
    model = ecg_net(noise).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, LEADS, LENGTH, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )

    def step():
        x, y = next(data)
        with mixed():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return prepare(AlwaysNoise)


def clean():
    return prepare(Noise)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
