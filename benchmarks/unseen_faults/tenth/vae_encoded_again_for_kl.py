"""The loss of a variational autoencoder calls the model for the reconstruction and its encoder once
more, on the same images, for the mean and variance of the KL term.
A good finding names the encoder that runs twice on the same images, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 512,
    "CPU_BATCH": 16,
    "CAUSE": "the encoder runs a second time on the same images for the KL term of the loss",
    "FIX": "let forward return mean and log-variance with the reconstruction",
}
SIZE, WIDTH, LATENT = 32, by_device(128, 24), 32


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        w = WIDTH
        self.encoder = nn.Sequential(
            nn.Conv2d(3, w, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(w, w, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(w, 2 * w, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * w * 64, 2 * LATENT),
        )
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, 2 * w * 64),
            nn.Unflatten(1, (2 * w, 8, 8)),
            nn.ConvTranspose2d(2 * w, w, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(w, 3, 4, 2, 1),
        )

    def encode(self, images):
        return self.encoder(images).chunk(2, 1)

    def decode(self, mean, spread, noise):
        return self.decoder(mean + noise * (0.5 * spread).exp())

    def forward(self, images, noise):
        mean, spread = self.encode(images)
        return self.decode(mean, spread, noise), mean, spread


def divergence(mean, spread):
    return 0.5 * (mean.square() + spread.exp() - spread - 1).sum(1).mean()


def again(model, batch):
    images, noise = batch
    with mixed():
        made, _, _ = model(images, noise)
        mean, spread = model.encode(images)  # guilty
        return F.mse_loss(made, images) + 1e-3 * divergence(mean, spread)


def once(model, batch):
    images, noise = batch
    with mixed():
        made, mean, spread = model(images, noise)
        return F.mse_loss(made, images) + 1e-3 * divergence(mean, spread)


def build(loss):
    my_turn()
    chance = torch.Generator(device()).manual_seed(1)

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, SIZE, SIZE, device=device(), generator=chance),
                torch.randn(size, LATENT, device=device(), generator=chance),
            )
        )

    return steplab.UserModel(Autoencoder(), batches, loss, unit="images")


def faulty():
    return build(again)


def clean():
    return build(once)
