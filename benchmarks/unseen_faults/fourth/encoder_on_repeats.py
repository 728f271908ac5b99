"""An importance-weighted autoencoder takes many latent samples per image. The images are repeated
before the encoder, which so computes the same means and variances again for each sample.
A good finding names the encoder's work on identical rows, or the memory of its activations, and the
line that repeats the images.
"""

import math

import steplab
import torch
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 16,
    "CAUSE": "images are repeated once per latent sample before the encoder, which computes every image many times",
    "FIX": "encode once and let the means and variances broadcast",
}
SIDE, WIDTH, LATENT, SAMPLES = 32, by_device(64, 12), 32, by_device(16, 12)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        w = WIDTH
        self.encoder = nn.Sequential(
            nn.Conv2d(3, w, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(w, 2 * w, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(2 * w, 2 * w, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(2 * w * (SIDE // 4) ** 2, 2 * LATENT),
        ).to(memory_format=torch.channels_last)
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, 8 * w), nn.SiLU(), nn.Linear(8 * w, 3 * SIDE * SIDE)
        )

    def moments(self, x):
        return self.encoder(x).chunk(2, 1)

    def weights(self, x, mean, spread, noise):
        z = mean + spread.exp() * noise
        error = (self.decoder(z) - x).square().sum(-1) / 2
        prior = (z.square() - noise.square()).sum(-1) / 2 - spread.sum(-1)
        return -(error + prior)


class OnRepeats(Autoencoder):
    def forward(self, x, noise):
        x = x.repeat_interleave(SAMPLES, 0)  # guilty
        parts = (part.reshape(*noise.shape[:2], -1) for part in (x, *self.moments(x)))
        return self.weights(*parts, noise)


class Once(Autoencoder):
    def forward(self, x, noise):
        parts = (part.reshape(len(x), 1, -1) for part in (x, *self.moments(x)))
        return self.weights(*parts, noise)


def build(model):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.rand(size, 3, SIDE, SIDE, device=device()).contiguous(
                    memory_format=torch.channels_last
                ),
                torch.randn(size, SAMPLES, LATENT, device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            weights = model(*batch).float()
        return math.log(SAMPLES) - weights.logsumexp(1).mean()

    return steplab.UserModel(model(), batches, loss, unit="images")


def faulty():
    return build(OnRepeats)


def clean():
    return build(Once)
