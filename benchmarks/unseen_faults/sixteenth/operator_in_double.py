"""A Fourier neural operator learns the flow of a simulated field. The simulator's arrays come from numpy
in double precision, and the error message about different dtypes was answered by making the model
double as well; each transform and product then moves and computes twice the bits.
A good finding names float64 (model and data in double precision), and the line that makes the model
double or any of its operations.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the whole model was made double because the data came from numpy in float64",
    "FIX": "convert the fields to float32 and leave the model in float32",
    "BATCH": 32,
    "CPU_BATCH": 4,
}
SIDE, WIDTH, MODES, LAYERS = (
    by_device(128, 40),
    by_device(64, 20),
    by_device(16, 8),
    by_device(4, 3),
)


class FourierLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, WIDTH, WIDTH, MODES, MODES, 2) / WIDTH)
        self.local = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x):
        spectrum = torch.fft.rfft2(x, norm="ortho")
        low, high = torch.view_as_complex(self.weights)
        kept = torch.zeros_like(spectrum)
        kept[:, :, :MODES, :MODES] = torch.einsum(
            "bixy,ioxy->boxy", spectrum[:, :, :MODES, :MODES], low
        )
        kept[:, :, -MODES:, :MODES] = torch.einsum(
            "bixy,ioxy->boxy", spectrum[:, :, -MODES:, :MODES], high
        )
        return F.gelu(torch.fft.irfft2(kept, s=x.shape[-2:], norm="ortho") + self.local(x))


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv2d(1, WIDTH, 1)
        self.layers = nn.ModuleList(FourierLayer() for _ in range(LAYERS))
        self.end = nn.Sequential(
            nn.Conv2d(WIDTH, 2 * WIDTH, 1), nn.GELU(), nn.Conv2d(2 * WIDTH, 1, 1)
        )

    def forward(self, x):
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


def simulated(size):
    fields = np.random.default_rng(size).standard_normal((2, size, 1, SIDE, SIDE))
    return torch.from_numpy(fields).to(device())


def loss_of(model, fields):
    before, after = fields
    error = (model(before) - after).flatten(1).norm(dim=1)
    return (error / after.flatten(1).norm(dim=1)).mean()


def double_batches(size):
    return in_turn(lambda: simulated(size))


def float_batches(size):
    return in_turn(lambda: simulated(size).float())


def build(model, batches):
    import steplab

    return steplab.UserModel(model, batches, loss_of, optimizer=adamw)


def faulty():
    return build(Operator().double(), double_batches)  # guilty


def clean():
    return build(Operator(), float_batches)
