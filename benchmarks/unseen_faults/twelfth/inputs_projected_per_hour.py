"""A forecaster of electricity load: a recurrent layer of one's own (a minimal gated unit) reads
the hours of eight days. The linear layer of the inputs runs inside the loop, hour by hour, although
all inputs are known before it.
A good finding names the small products of the inputs within the loop over time, and the line that
projects one hour at a time.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the inputs of the recurrent layer are projected hour by hour in the loop over time",
    "FIX": "project the whole sequence at once before the loop",
}
BATCH, HOURS, FEATURES = by_device(64, 8), 192, by_device(512, 256)
WIDTH, AHEAD = by_device(256, 48), 24


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(FEATURES, 2 * WIDTH)
        self.state = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, AHEAD)

    def cell(self, given, h):
        gate, new = given.chunk(2, -1)
        return torch.lerp(h, torch.tanh(new + self.state(h)), torch.sigmoid(gate))


class PerHour(Gated):
    def forward(self, x):
        h = x.new_zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            given = self.inputs(x[:, t])  # guilty
            h = self.cell(given, h)
        return self.head(h)


class AtOnce(Gated):
    def forward(self, x):
        h = x.new_zeros(x.shape[0], WIDTH)
        for given in self.inputs(x).unbind(1):
            h = self.cell(given, h)
        return self.head(h)


def batch():
    x = torch.randn(BATCH, HOURS, FEATURES, device=device())
    return x, torch.randn(BATCH, AHEAD, device=device())


def training(kind):
    model = kind().to(device())
    optimizer, data = adamw(model), in_turn(batch)

    def step():
        x, wanted = next(data)
        loss = F.mse_loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(PerHour)


def clean():
    return training(AtOnce)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
