"""A GAN on small images makes one batch of fakes and uses it for both halves of the step. The loss of
the discriminator is computed on the fakes without `detach()`. Autograd then complained that the
graph had been freed, and somebody added `retain_graph=True`. So the backward pass of the
discriminator's loss also runs through the whole generator, whose gradients are thrown away by the
`zero_grad` before its own half.
A good finding names the backward pass of the discriminator's loss through the generator (gradients
that nobody uses), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the fakes are not detached for the discriminator's loss, so its backward pass runs through the generator too",
    "FIX": "give the discriminator fakes.detach() in its own loss and drop retain_graph",
}
BATCH, WIDTH, NOISE = by_device(256, 12), by_device(128, 24), 64


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(NOISE, 4 * WIDTH * 16)
        self.net = nn.Sequential(
            nn.BatchNorm2d(4 * WIDTH),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4 * WIDTH, 2 * WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(inplace=True),
            nn.Conv2d(WIDTH, 3, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.net(self.start(noise).view(-1, 4 * WIDTH, 4, 4))


def discriminator():
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(2 * WIDTH, 4 * WIDTH, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(4 * WIDTH * 16, 1),
    )


def build(detach):
    generator, critic = Generator().to(device()), discriminator().to(device())
    generator_adam = adamw(generator, betas=(0.5, 0.999))
    critic_adam = adamw(critic, betas=(0.5, 0.999))
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, 32, 32, device=device()).tanh(),
            torch.randn(BATCH, NOISE, device=device()),
        )
    )

    def step():
        images, noise = next(data)
        with mixed():
            fakes = generator(noise)

        critic_adam.zero_grad()
        with mixed():
            seen = fakes.detach() if detach else fakes
            critic_loss = F.softplus(-critic(images)).mean() + F.softplus(critic(seen)).mean()
        if detach:
            critic_loss.backward()
        else:
            critic_loss.backward(retain_graph=True)  # guilty
        critic_adam.step()

        generator_adam.zero_grad()
        critic.requires_grad_(False)
        with mixed():
            generator_loss = F.softplus(-critic(fakes)).mean()
        generator_loss.backward()
        generator_adam.step()
        critic.requires_grad_(True)
        return (critic_loss + generator_loss).detach()

    return step


def faulty():
    return build(detach=False)


def clean():
    return build(detach=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
