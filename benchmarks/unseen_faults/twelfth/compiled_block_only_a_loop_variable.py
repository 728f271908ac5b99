"""A vocoder of residual units with snake activations. Each is meant to be compiled, but the loop
assigns the compiled unit to its own variable, and the model keeps the eager ones.
A good finding names the units that run eagerly although they were compiled, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the compiled units are assigned to the loop variable; the model runs the eager ones",
    "FIX": "call unit.compile(), or put the compiled unit back into the model",
}
BATCH, TIME, WIDTH, UNITS = by_device(32, 2), by_device(16384, 8192), by_device(64, 16), 6


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x + torch.sin(self.one * x).square() / (self.one + 1e-6)
        y = self.mix(y)
        y = y + torch.sin(self.two * y).square() / (self.two + 1e-6)
        return x + self.out(y)


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.units = nn.ModuleList(Unit() for _ in range(UNITS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.first(x)
        for unit in self.units:
            x = unit(x)
        return self.last(x).squeeze(-1)


def training(model):
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, TIME, 8, device=device()),
            torch.randn(BATCH, TIME, device=device()),
        ),
        4,
    )

    def step():
        features, wave = next(data)
        with mixed():
            guess = model(features)
        loss = F.l1_loss(guess.float(), wave)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    model = Vocoder().to(device())
    for unit in model.units:
        unit = torch.compile(unit)  # guilty
    return training(model)


def clean():
    model = Vocoder().to(device())
    for unit in model.units:
        unit.compile()
    return training(model)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
