"""The weight of an adversarial loss is the ratio of two gradients of the last layer. The gradients
are asked for all parameters and the last one is taken: two full backward passes before the real
one.
A good finding names the gradients of all parameters that nobody reads, and the line of
torch.autograd.grad.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the gradients of all parameters are computed twice more, although only that of the last layer is read",
    "FIX": "torch.autograd.grad(loss, last.weight)",
}
BATCH, SIDE, CHANNELS = by_device(64, 14), by_device(128, 32), by_device(128, 24)


def prepare():
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(CHANNELS, 3, 3, padding=1, bias=False),
    ).to(device(), memory_format=torch.channels_last)
    critic = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 4, 4), nn.ReLU(), nn.Conv2d(CHANNELS, 1, 4, 4)
    ).to(device(), memory_format=torch.channels_last)
    critic.requires_grad_(False)  # its own update is left out
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    images = in_turn(
        lambda: torch.rand(BATCH, 3, SIDE, SIDE, device=device()).contiguous(
            memory_format=torch.channels_last
        )
    )
    return model, critic, optimizer, images


def losses(model, critic, images):
    with mixed():
        outputs = model(images)
        return F.l1_loss(outputs, images), F.softplus(-critic(outputs)).mean()


def update(optimizer, likeness, deceit, a, b):
    weight = (a.norm() / (b.norm() + 1e-4)).clamp(0, 1e4)
    loss = likeness + 0.1 * weight * deceit
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, critic, optimizer, images = prepare()
    weights = list(model.parameters())

    def step():
        pair = losses(model, critic, next(images))
        a, b = (torch.autograd.grad(x, weights, retain_graph=True)[-1] for x in pair)  # guilty
        return update(optimizer, *pair, a, b)

    return step


def clean():
    model, critic, optimizer, images = prepare()
    last = model[-1].weight

    def step():
        pair = losses(model, critic, next(images))
        a, b = (torch.autograd.grad(x, last, retain_graph=True)[0] for x in pair)
        return update(optimizer, *pair, a, b)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
