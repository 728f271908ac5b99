"""A model of machine wear gets the readings of six optional sensors in a dictionary, from which those are
missing that failed. The whole model is compiled, and each set of keys makes it compile anew.
A good finding names the changing keys of the dictionary, for which the model is compiled until the limit.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the compiled model branches on the keys of a dictionary and is compiled anew per set of keys up to the limit, then runs eagerly",
    "FIX": "add up the present readings before the compiled part, or pass zeros for missing ones",
}
SENSORS = ("current", "heat", "noise", "pressure", "speed", "torque")
BATCH, TIME = by_device(64, 16), by_device(2048, 640)
WIDTH, LAYERS = by_device(256, 32), 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.shift, self.strength = nn.Parameter(torch.zeros(WIDTH)), 0.5

    def forward(self, x):
        y = self.linear(x) * self.scale + self.shift
        gate = (y + 3).clamp(0, 6) / 6
        bump = y / (1 + y.abs())
        return x + self.strength * (y * gate + bump * (1 - gate))


class Wear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 1)

    def combine(self, readings):
        x = readings["vibration"]
        for name in SENSORS:
            if name in readings:  # guilty
                x = x + readings[name]
        return x

    def predict(self, x):
        return self.head(self.layers(x)).squeeze(-1)

    def forward(self, readings):
        return self.predict(self.combine(readings))


def prepare():
    torch.manual_seed(0)
    model = Wear().to(device())
    names = ("vibration", *SENSORS)

    def readings():
        shapes = [(BATCH, TIME if name == "vibration" else 1, WIDTH) for name in names]
        values = [torch.randn(shape, device=device()) for shape in shapes]
        return dict(zip(names, values, strict=True)), torch.rand(BATCH, TIME, device=device())

    return model, adamw(model), in_turn(readings), random.Random(0)


def training(model, optimizer, data, chance, forward):
    def step():
        readings, wear = next(data)
        failed = {name for name in SENSORS if chance.random() < 0.5}
        readings = {name: value for name, value in readings.items() if name not in failed}
        with mixed():
            guess = forward(readings)
        loss = F.mse_loss(guess.float(), wear)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    model, *rest = prepare()
    return training(model, *rest, torch.compile(model))


def clean():
    model, *rest = prepare()
    predict = torch.compile(model.predict)
    return training(model, *rest, lambda readings: predict(model.combine(readings)))


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
