"""The discriminator's loss sees the fake images with their graph, so its backward pass also goes
through the whole generator, whose gradients are then thrown away by zero_grad.
A good finding names the generator's needless backward, and the line that gives the discriminator
fakes that were not detached.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the discriminator's loss backpropagates through the generator, since the fakes are not detached; those gradients are cleared unread",
    "FIX": "discriminator(fake.detach()), and no retain_graph",
}
BATCH, WIDTH, NOISE = by_device(256, 12), by_device(64, 24), 100


def networks():
    w = WIDTH
    generator = nn.Sequential(
        nn.ConvTranspose2d(NOISE, 8 * w, 4, 1, 0, bias=False),
        nn.BatchNorm2d(8 * w),
        nn.ReLU(),
        nn.ConvTranspose2d(8 * w, 4 * w, 4, 2, 1, bias=False),
        nn.BatchNorm2d(4 * w),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * w, 2 * w, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * w),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * w, 3, 4, 2, 1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(3, w, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(w, 2 * w, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * w, 1, 8),
        nn.Flatten(),
    )
    return generator.to(device()), discriminator.to(device())


def prepare():
    generator, discriminator = networks()
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    images = in_turn(lambda: torch.rand(BATCH, 3, 32, 32, device=device()) * 2 - 1)
    noises = in_turn(lambda: torch.randn(BATCH, NOISE, 1, 1, device=device()))
    ones = torch.ones(BATCH, 1, device=device())
    return generator, discriminator, opt_g, opt_d, images, noises, ones


def faulty():
    generator, discriminator, opt_g, opt_d, images, noises, ones = prepare()
    bce = F.binary_cross_entropy_with_logits

    def step():
        opt_d.zero_grad()
        with mixed():
            fake = generator(next(noises))
            loss_d = bce(discriminator(next(images)), ones)
            loss_d = loss_d + bce(discriminator(fake), 1 - ones)  # guilty
        loss_d.backward(retain_graph=True)
        opt_d.step()
        opt_g.zero_grad()
        with mixed():
            loss_g = bce(discriminator(fake), ones)
        loss_g.backward()
        opt_g.step()
        return loss_d.detach() + loss_g.detach()

    return step


def clean():
    generator, discriminator, opt_g, opt_d, images, noises, ones = prepare()
    bce = F.binary_cross_entropy_with_logits

    def step():
        opt_d.zero_grad()
        with mixed():
            fake = generator(next(noises))
            loss_d = bce(discriminator(next(images)), ones)
            loss_d = loss_d + bce(discriminator(fake.detach()), 1 - ones)
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        with mixed():
            loss_g = bce(discriminator(fake), ones)
        loss_g.backward()
        opt_g.step()
        return loss_d.detach() + loss_g.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
