"""A forecaster splits its states into trend and season after every layer: the trend is a moving average over
the last hours. The average is written as one slice, one mean and one list entry for each hour, and a stack
at the end; in the backward pass every slice makes a gradient as large as the whole series. An average
pooling with stride one is the same in one call.
A good finding names the Python loop of slices and means over the hours, and a line of it.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the moving average slices and averages one window after the other in a Python loop",
    "FIX": "F.avg_pool1d(padded.transpose(1, 2), kernel, stride=1)",
    "BATCH": 32,
    "CPU_BATCH": 8,
}
HOURS, AHEAD, SENSORS, KERNEL = by_device(336, 96), by_device(96, 24), 7, 13
WIDTH, HEADS, LAYERS = by_device(256, 64), by_device(8, 4), by_device(3, 2)


def padded(x):
    front, back = (KERNEL - 1) // 2, KERNEL // 2
    return torch.cat([x[:, :1].expand(-1, front, -1), x, x[:, -1:].expand(-1, back, -1)], 1)


def trend_by_hour(x):
    wide = padded(x)
    return torch.stack([wide[:, i : i + KERNEL].mean(1) for i in range(x.shape[1])], 1)  # guilty


def trend_by_pooling(x):
    return F.avg_pool1d(padded(x).transpose(1, 2), KERNEL, stride=1).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, trend_of):
        super().__init__()
        self.trend_of = trend_of
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        trend = self.trend_of(x)
        return x - trend, trend


class Forecaster(nn.Module):
    def __init__(self, trend_of):
        super().__init__()
        self.into = nn.Linear(SENSORS, WIDTH)
        self.layers = nn.ModuleList(Layer(trend_of) for _ in range(LAYERS))
        self.season, self.trend = nn.Linear(HOURS, AHEAD), nn.Linear(HOURS, AHEAD)
        self.out = nn.Linear(WIDTH, SENSORS)

    def forward(self, past):
        season, trend = self.into(past), 0.0
        for layer in self.layers:
            season, more = layer(season)
            trend = trend + more
        ahead = self.season(season.transpose(1, 2)) + self.trend(trend.transpose(1, 2))
        return self.out(ahead.transpose(1, 2))


def series(size):
    def make():
        both = torch.randn(size, HOURS + AHEAD, SENSORS, device=device()).cumsum(1) * 0.1
        return both[:, :HOURS].contiguous(), both[:, HOURS:].contiguous()

    return in_turn(make)


def loss_of(model, batch):
    past, future = batch
    return F.mse_loss(model(past), future)


def faulty():
    return steplab.UserModel(Forecaster(trend_by_hour), series, loss_of, optimizer=adamw)


def clean():
    return steplab.UserModel(Forecaster(trend_by_pooling), series, loss_of, optimizer=adamw)
