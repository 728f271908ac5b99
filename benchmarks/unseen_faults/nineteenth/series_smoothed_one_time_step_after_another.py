"""A forecaster of electricity use smooths each series exponentially, with a rate that is learned for every
channel, and reads level and rest with an MLP. The level is computed as in the textbook, one time step
after another in a Python loop: some tiny kernels for each of hundreds of steps, and as many nodes for
the backward pass. The smoothing is linear, so one product with a matrix of decays gives all levels.
A good finding names the many tiny kernels of the loop over time, and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the exponential smoothing runs over time step by step in a Python loop",
    "FIX": "multiply the series by the lower triangular matrix of the decays",
    "BATCH": 256,
    "CPU_BATCH": 32,
}
TIME, AHEAD, CHANNELS = by_device(512, 256), by_device(96, 24), by_device(32, 4)
HIDDEN = by_device(2048, 640)


def level_step_by_step(x, rate):
    level, levels = x[..., 0], [x[..., 0]]
    for t in range(1, x.shape[-1]):
        level = rate * x[..., t] + (1 - rate) * level  # guilty
        levels.append(level)
    return torch.stack(levels, -1)


def level_at_once(x, rate):
    time = x.shape[-1]
    ago = torch.arange(time, device=x.device)
    ago = (ago[:, None] - ago).clamp(min=0)
    decay = torch.exp(ago * torch.log(1 - rate)[:, None, None]).tril()
    weight = torch.cat([decay[..., :1], rate[:, None, None] * decay[..., 1:]], -1)
    return torch.einsum("cts,bcs->bct", weight, x)


class Forecaster(nn.Module):
    def __init__(self, smooth):
        super().__init__()
        self.smooth, self.rate = smooth, nn.Parameter(torch.zeros(CHANNELS))
        self.read = nn.Sequential(
            nn.Linear(2 * TIME, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU()
        )
        self.out = nn.Linear(HIDDEN, AHEAD)

    def forward(self, x):
        level = self.smooth(x, self.rate.sigmoid())
        return self.out(self.read(torch.cat([level, x - level], -1)))


def series(size):
    def batch():
        past = torch.randn(size, CHANNELS, TIME, device=device()).cumsum(-1) * 0.1
        return past, torch.randn(size, CHANNELS, AHEAD, device=device())

    return in_turn(batch)


def loss(model, batch):
    past, future = batch
    with mixed():
        return F.mse_loss(model(past).float(), future)


def faulty():
    return steplab.UserModel(Forecaster(level_step_by_step), series, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(Forecaster(level_at_once), series, loss, optimizer=adamw)
