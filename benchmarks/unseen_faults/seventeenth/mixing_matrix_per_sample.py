"""A forecasting model of MLPs alone mixes each series over time by a square weight, then over channels.
To use torch.bmm, the weight of the time mixing is expanded to the batch; autocast then writes a 16-bit
copy for each sample, and its gradient has one matrix per sample, which is summed afterwards.
A good finding names the weight that is expanded (copied) to the batch and the line with bmm.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the weight of the time mixing is expanded to the batch for bmm, so it and its gradient "
    "exist once per sample",
    "FIX": "multiply by the one weight: torch.einsum or F.linear over the transposed series",
}
BATCH, TIME, CHANNELS = by_device(2048, 96), by_device(512, 192), by_device(64, 8)
LAYERS, HORIZON = by_device(5, 3), by_device(96, 24)


def mix_expanded(weight, x):
    return torch.bmm(weight.expand(len(x), -1, -1), x)  # guilty


def mix_shared(weight, x):
    return torch.einsum("st,btc->bsc", weight, x)


class Layer(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.mix = mix
        self.norm1, self.norm2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.over_time = nn.Parameter(torch.randn(TIME, TIME) * TIME**-0.5)
        self.up, self.down = nn.Linear(CHANNELS, 2 * CHANNELS), nn.Linear(2 * CHANNELS, CHANNELS)

    def forward(self, x):
        x = x + F.relu(self.mix(self.over_time, self.norm1(x)))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Mixer(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.layers = nn.Sequential(*(Layer(mix) for _ in range(LAYERS)))
        self.head = nn.Linear(TIME, HORIZON)

    def forward(self, x):
        return self.head(self.layers(x).transpose(1, 2)).transpose(1, 2)


def build(mix):
    model = Mixer(mix).to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randn(BATCH, TIME + HORIZON, CHANNELS, device=device()), 4)

    def step():
        series = next(data)
        with mixed():
            forecast = model(series[:, :TIME])
            loss = F.mse_loss(forecast.float(), series[:, TIME:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(mix_expanded)


def clean():
    return build(mix_shared)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
