"""The flow of a fluid is continued by a network whose layers see slopes and Laplacian, taken in Fourier space.
The wave numbers come from numpy in double precision, so the product with the spectrum is complex128 and
the inverse transforms and their backward run in double precision, until the layer casts back.
A good finding names double precision (or the promotion) in the Fourier layers and one of its lines.
"""

import numpy as np
import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "double-precision wave numbers from numpy promote the spectra and transforms to double",
    "FIX": "make the wave numbers complex64, as the spectrum of the field is",
    "BATCH": 32,
    "CPU_BATCH": 5,
}
SIDE, WIDTH, LAYERS = by_device(256, 48), by_device(48, 12), by_device(6, 3)


def derivatives():
    across = 2j * np.pi * np.fft.fftfreq(SIDE)[:, None] * np.ones(SIDE // 2 + 1)
    along = 2j * np.pi * np.fft.rfftfreq(SIDE) * np.ones((SIDE, 1))
    return torch.from_numpy(np.stack([across, along, across**2 + along**2]))


class FourierLayer(nn.Module):
    def __init__(self, promoted):
        super().__init__()
        self.promoted = promoted
        self.register_buffer("waves", derivatives())
        self.here = nn.Conv2d(WIDTH, WIDTH, 1)
        self.bent = nn.Conv2d(3 * WIDTH, WIDTH, 1)

    def forward(self, x):
        spectrum = torch.fft.rfft2(x).unsqueeze(2)
        if self.promoted:
            spectrum = spectrum * self.waves  # guilty
        else:
            spectrum = spectrum * self.waves.to(spectrum.dtype)
        slopes = torch.fft.irfft2(spectrum, s=x.shape[2:]).flatten(1, 2)
        return x + F.relu(self.here(x) + self.bent(slopes.to(x.dtype)))


class FlowNet(nn.Module):
    def __init__(self, promoted):
        super().__init__()
        self.into, self.out = nn.Conv2d(2, WIDTH, 1), nn.Conv2d(WIDTH, 2, 1)
        self.layers = nn.Sequential(*(FourierLayer(promoted) for _ in range(LAYERS)))

    def forward(self, field):
        return field + self.out(self.layers(self.into(field)))


def flows(size):
    return in_turn(lambda: torch.randn(2, size, 2, SIDE, SIDE, device=device()))


def loss(model, batch):
    now, after = batch
    return F.mse_loss(model(now), after)


def faulty():
    return steplab.UserModel(FlowNet(promoted=True), flows, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(FlowNet(promoted=False), flows, loss, optimizer=adamw)
