"""A consistency model learns from targets that the moving average of its own weights computes at two
lower noises. For each of them the average is copied into the network, and the weights are put back.
A good finding names the copies of all weights, there and back, in every step, and the line that causes them.
"""

from contextlib import contextmanager
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all weights are saved, overwritten by their moving average and restored for every target that a step computes",
    "FIX": "keep the moving average as a network of its own and call that one",
}
BATCH, FEATURES, WIDTH = by_device(512, 4), 256, by_device(4096, 1600)
SHARES = (0.9, 0.6)


class Average:
    """A moving average of weights that can take their place."""

    def __init__(self, parameters, decay=0.99):
        self.parameters, self.decay = list(parameters), decay
        self.shadow = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(self.shadow, self.parameters, 1 - self.decay)

    @contextmanager
    def in_place_of_weights(self):
        saved = [p.detach().clone() for p in self.parameters]
        torch._foreach_copy_(self.parameters, self.shadow)
        yield
        torch._foreach_copy_(self.parameters, saved)


def prepare():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES + 1, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, FEATURES),
    ).to(device())
    data = in_turn(lambda: torch.randn(BATCH, FEATURES, device=device()))
    return model, adamw(model), data


def denoise(model, x, noise, level):
    noisy = x + level * noise
    with mixed():
        change = model(torch.cat([noisy, level], 1))
    return noisy - level * change.float()


def learn(model, optimizer, x, noise, level, target):
    loss = F.mse_loss(denoise(model, x, noise, level), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()
    average = Average(model.parameters())

    def target_at(x, noise, level):
        with torch.no_grad(), average.in_place_of_weights():  # guilty
            return denoise(model, x, noise, level)

    def step():
        x = next(data)
        noise, level = torch.randn_like(x), torch.rand(BATCH, 1, device=device())
        targets = [target_at(x, noise, share * level) for share in SHARES]
        loss = learn(model, optimizer, x, noise, level, sum(targets) / len(SHARES))
        average.update()
        return loss

    return step


def clean():
    model, optimizer, data = prepare()
    teacher = deepcopy(model).requires_grad_(False)
    theirs, ours = list(teacher.parameters()), list(model.parameters())

    def target_at(x, noise, level):
        with torch.no_grad():
            return denoise(teacher, x, noise, level)

    def step():
        x = next(data)
        noise, level = torch.randn_like(x), torch.rand(BATCH, 1, device=device())
        targets = [target_at(x, noise, share * level) for share in SHARES]
        loss = learn(model, optimizer, x, noise, level, sum(targets) / len(SHARES))
        with torch.no_grad():
            torch._foreach_lerp_(theirs, ours, 0.01)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
