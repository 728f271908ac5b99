"""A diffusion policy for a robot arm keeps a moving average of its weights. A Python loop updates it
one weight after the other with four operators each, three of which make new tensors: more than a
thousand tiny launches per step for a network of 290 tensors. torch._foreach_lerp_ does all of them
in a few launches.
A good finding names the update of the average tensor by tensor and the line.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the moving average of the weights is updated in a Python loop, four operators with new memory per tensor",
    "FIX": "update all averages with one torch._foreach_lerp_",
}
BATCH, HORIZON, ACTION = by_device(512, 1), by_device(16, 8), 14
WIDTH, BLOCKS, DECAY = by_device(256, 32), by_device(24, 48), 0.999


class Mixer(nn.Module):
    """Mix along the horizon, then along the features."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(HORIZON, 4 * HORIZON), nn.Linear(4 * HORIZON, HORIZON)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.b(F.gelu(self.a(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.level = nn.Linear(ACTION, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.Sequential(*[Mixer() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, ACTION)

    def forward(self, actions, level):
        x = self.embed(actions) + self.level(level)
        return self.head(self.blocks(x))


@torch.no_grad()
def by_tensor(averages, weights):
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(DECAY * average + (1 - DECAY) * weight)  # guilty


@torch.no_grad()
def all_at_once(averages, weights):
    torch._foreach_lerp_(averages, weights, 1 - DECAY)


def build(update):
    model = Policy().to(device())
    optimizer = adamw(model)
    averaged = copy.deepcopy(model).requires_grad_(False)
    weights, averages = list(model.parameters()), list(averaged.parameters())

    def batch():
        actions, noise = torch.randn(2, BATCH, HORIZON, ACTION, device=device())
        level = torch.rand(BATCH, 1, 1, device=device())
        return actions * (1 - level) + noise * level, level, noise - actions

    data = in_turn(batch)

    def step():
        noisy, level, velocity = next(data)
        with mixed():
            loss = F.mse_loss(model(noisy, level).float(), velocity)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update(averages, weights)
        return loss.detach()

    return step


def faulty():
    return build(by_tensor)


def clean():
    return build(all_at_once)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
