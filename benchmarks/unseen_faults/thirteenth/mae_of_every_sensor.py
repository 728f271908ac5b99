"""The forecasts of a road network are logged sensor by sensor: after every step a loop over all sensors
takes the mean error of each and reads it with item(), so the host waits for the device hundreds of
times per step. One mean over the other dimensions has the errors of all sensors; they can be
added up on the device and read when a line of the log is written, every 200 steps.
A good finding names the errors that are read sensor by sensor and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the error of every sensor is computed by itself and read with item() in every step for a log",
    "FIX": "take the errors of all sensors with one mean and add them up on the device",
}
SENSORS, PAST, FUTURE = by_device(325, 883), 24, 12
BATCH, WIDTH, LAYERS, EVERY = by_device(384, 8), by_device(512, 48), by_device(4, 2), 200


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.sensors = nn.Linear(PAST, WIDTH), nn.Embedding(SENSORS, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, FUTURE)

    def forward(self, past):
        return self.head(self.layers(self.embed(past) + self.sensors.weight))


class ReadEach:
    def __init__(self):
        self.totals = [0.0] * SENSORS

    def add(self, forecast, future):
        for s in range(SENSORS):
            self.totals[s] += F.l1_loss(forecast[:, s], future[:, s]).item()  # guilty

    def means(self):
        return [total / EVERY for total in self.totals]


class KeepAll:
    def __init__(self):
        self.totals = torch.zeros(SENSORS, device=device())

    def add(self, forecast, future):
        self.totals += (forecast - future).abs().mean((0, 2))

    def means(self):
        return (self.totals / EVERY).tolist()


def build(kind):
    model = Forecaster().to(device())
    optimizer, meter, steps = adamw(model), kind(), 0
    data = in_turn(lambda: torch.randn(BATCH, SENSORS, PAST + FUTURE, device=device()), 4)

    def step():
        nonlocal meter, steps
        past, future = next(data).split([PAST, FUTURE], -1)
        with mixed():
            forecast = model(past)
        loss = F.huber_loss(forecast.float(), future)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.add(forecast.detach(), future)
        steps += 1
        if steps % EVERY == 0:
            print(meter.means())
            meter = kind()
        return loss.detach()

    return step


def faulty():
    return build(ReadEach)


def clean():
    return build(KeepAll)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
