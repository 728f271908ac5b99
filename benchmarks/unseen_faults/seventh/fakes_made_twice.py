"""A GAN's generator makes its images for the discriminator's turn, and makes the very same images
from the same noise again for its own turn, although its weights have not changed in between.
A good finding names the second run of the generator on the same noise, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the generator runs twice on the same noise, once for each loss",
    "FIX": "make the fakes once: detached for the discriminator, with their graph for the generator",
}
BATCH, NOISE, WIDTH, SIZE = by_device(256, 16), 64, by_device(128, 32), 32


def generator():
    w = WIDTH
    return nn.Sequential(
        nn.Linear(NOISE, w * 64),
        nn.Unflatten(1, (w, 8, 8)),
        nn.ConvTranspose2d(w, w, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(w, w, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(w, w, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(w, 3, 3, padding=1),
        nn.Tanh(),
    )


def discriminator():
    w = WIDTH // 2
    return nn.Sequential(
        nn.Conv2d(3, w, 4, 4),
        nn.LeakyReLU(0.2),
        nn.Conv2d(w, 2 * w, 4, 4),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * w * 4, 1),
    )


def prepare():
    g, d = generator().to(device()), discriminator().to(device())
    data = in_turn(
        lambda: (
            torch.rand(BATCH, 3, SIZE, SIZE, device=device()),
            torch.randn(BATCH, NOISE, device=device()),
        )
    )
    return g, d, adamw(g), adamw(d), data


def discriminate(d, optimizer, real, fake):
    with mixed():
        loss = F.softplus(-d(real)).mean() + F.softplus(d(fake)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def fool(d, optimizer, fake):
    d.requires_grad_(False)
    with mixed():
        loss = F.softplus(-d(fake)).mean()
    loss.backward()
    d.requires_grad_(True)
    optimizer.step()
    optimizer.zero_grad()


def faulty():
    g, d, of_g, of_d, data = prepare()

    def step():
        real, noise = next(data)
        with torch.no_grad(), mixed():
            fake = g(noise)
        loss = discriminate(d, of_d, real, fake)
        with mixed():
            fake = g(noise)  # guilty
        fool(d, of_g, fake)
        return loss

    return step


def clean():
    g, d, of_g, of_d, data = prepare()

    def step():
        real, noise = next(data)
        with mixed():
            fake = g(noise)
        loss = discriminate(d, of_d, real, fake.detach())
        fool(d, of_g, fake)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
