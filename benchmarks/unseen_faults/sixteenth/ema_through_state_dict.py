"""A diffusion model is trained with an exponential moving average of its weights, from which it will be
sampled. The average is updated by building a new state dict, entry by entry, and loading it into the
averaged model: four passes over all weights with new memory for each, where one in place would do.
A good finding names the update of the moving average through state dicts (temporaries and copies of all
weights, tensor by tensor) and the line.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the moving average of the weights is made as a new state dict and loaded, in every step",
    "FIX": "torch._foreach_lerp_ from the averaged parameters to the current ones, in place",
}
BATCH, SIDE, WIDTH = by_device(64, 1), by_device(32, 8), by_device(256, 160)
LAYERS, TIMES, DECAY = by_device(12, 6), 1000, 0.999


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, WIDTH), nn.GroupNorm(8, WIDTH)
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.moment = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, moment):
        y = self.conv1(F.silu(self.norm1(x))) + self.moment(moment)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(y)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.moments = nn.Embedding(TIMES, WIDTH)
        self.start = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.end = nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x, times):
        moment, x = F.silu(self.moments(times)), self.start(x)
        for layer in self.layers:
            x = layer(x, moment)
        return self.end(F.silu(x))


class AverageByStateDict:
    def __init__(self, model):
        self.model, self.averaged = model, copy.deepcopy(model).requires_grad_(False)

    def update(self):
        new, old = self.model.state_dict(), self.averaged.state_dict()
        mixed_up = {name: DECAY * old[name] + (1 - DECAY) * new[name] for name in new}  # guilty
        self.averaged.load_state_dict(mixed_up)


class AverageInPlace:
    def __init__(self, model):
        self.averaged = copy.deepcopy(model).requires_grad_(False)
        self.old, self.new = list(self.averaged.parameters()), list(model.parameters())

    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(self.old, self.new, 1 - DECAY)


def build(average):
    model = Denoiser().to(device())
    optimizer, averaged = adamw(model), average(model)
    levels = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES, device=device()), 0)
    data = in_turn(lambda: torch.rand(BATCH, 3, SIDE, SIDE, device=device()) * 2 - 1)

    def step():
        images = next(data)
        noise = torch.randn_like(images)
        times = torch.randint(TIMES, (BATCH,), device=device())
        level = levels[times].view(-1, 1, 1, 1)
        with mixed():
            found = model(level.sqrt() * images + (1 - level).sqrt() * noise, times)
        loss = F.mse_loss(found.float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update()
        return loss.detach()

    return step


def faulty():
    return build(AverageByStateDict)


def clean():
    return build(AverageInPlace)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
