"""A convolutional GAN is trained with a critic's turn and a generator's turn in each step. For the
critic's turn the fakes come straight from the generator, with their graph, so the critic's backward
pass runs on through the whole generator; those gradients are thrown away before the generator's turn.
A good finding names the fakes of the critic's turn that are neither detached nor drawn under no_grad
(the backward through the generator that nobody uses), and the line where they are drawn.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the critic's loss is backpropagated through the generator, whose gradients are discarded",
    "FIX": "draw the critic's fakes under torch.no_grad() or detach them",
}
BATCH, LATENT, WIDTH = by_device(128, 12), by_device(128, 64), by_device(64, 16)


def up(inputs, outputs):
    return nn.Sequential(
        nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def down(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 4, 2, 1), nn.LeakyReLU(0.2))


def make_generator():
    return nn.Sequential(
        nn.Linear(LATENT, 8 * WIDTH * 16),
        nn.Unflatten(1, (8 * WIDTH, 4, 4)),
        up(8 * WIDTH, 4 * WIDTH),
        up(4 * WIDTH, 2 * WIDTH),
        nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * WIDTH, 3, 4, 2, 1),
        nn.Tanh(),
    )


def make_critic():
    return nn.Sequential(
        down(3, WIDTH),
        down(WIDTH, 2 * WIDTH),
        down(2 * WIDTH, 4 * WIDTH),
        nn.Flatten(),
        nn.Linear(4 * WIDTH * 16, 1),
    )


def fakes_with_graph(generator, noise):
    return generator(noise)  # guilty


def fakes_alone(generator, noise):
    with torch.no_grad():
        return generator(noise)


def build(fakes_for_critic):
    generator, critic = make_generator().to(device()), make_critic().to(device())
    generator_optimizer, critic_optimizer = adamw(generator), adamw(critic)
    data = in_turn(lambda: torch.rand(BATCH, 3, 32, 32, device=device()) * 2 - 1)

    def step():
        real = next(data)
        noise = torch.randn(2, BATCH, LATENT, device=device())

        critic_optimizer.zero_grad()
        with mixed():
            fake = fakes_for_critic(generator, noise[0])
            critic_loss = F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean()
        critic_loss.backward()
        critic_optimizer.step()

        critic.requires_grad_(False)
        generator_optimizer.zero_grad()
        with mixed():
            generator_loss = F.softplus(-critic(generator(noise[1]))).mean()
        generator_loss.backward()
        generator_optimizer.step()
        critic.requires_grad_(True)
        return (critic_loss + generator_loss).detach()

    return step


def faulty():
    return build(fakes_with_graph)


def clean():
    return build(fakes_alone)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
