"""The moving average of the weights is updated after every micro-batch, inside the loop of the
gradient accumulation, although the weights change only once per step. (The average itself decays
faster than meant; the losses of training are the same.)
A good finding names the update of the average, or its lerp over all weights, and the line.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the moving average of all weights is updated after every micro-batch instead of after every update",
    "FIX": "update the average once per step, after optimizer.step()",
}
MICRO, BATCH, COLUMNS = 8, by_device(512, 4), 64
WIDTH, LAYERS, DECAY = by_device(4096, 768), 4, 0.999


class Denoiser(nn.Module):
    """Predicts the noise in the rows of a table."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(COLUMNS, WIDTH), nn.Linear(WIDTH, COLUMNS)
        self.time = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x, t):
        x = self.enter(x) + self.time(t)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.leave(x)


def prepare():
    model = Denoiser().to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, COLUMNS, device=device()),
            torch.randn(BATCH, 64, device=device()),
            torch.randn(BATCH, COLUMNS, device=device()),
        ),
        12,
    )
    ema = copy.deepcopy(model).requires_grad_(False)
    return model, ema, adamw(model), data


def average(ema, model):
    with torch.no_grad():
        torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - DECAY)


def gradients(model, data):
    x, t, noise = next(data)
    with mixed():
        loss = F.mse_loss(model(x + noise, t), noise) / MICRO
    loss.backward()
    return loss.detach()


def faulty():
    model, ema, optimizer, data = prepare()

    def step():
        total = 0
        for micro in range(MICRO):
            total += gradients(model, data)
            if micro == MICRO - 1:
                optimizer.step()
                optimizer.zero_grad()
            average(ema, model)  # guilty
        return total

    return step


def clean():
    model, ema, optimizer, data = prepare()

    def step():
        total = 0
        for _ in range(MICRO):
            total += gradients(model, data)
        optimizer.step()
        optimizer.zero_grad()
        average(ema, model)
        return total

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
