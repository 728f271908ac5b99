"""A forecaster of stacked blocks, each of which writes its part of the series as a sum of sines and cosines.
The basis was made with numpy and is float64; when torch refused to multiply it with the network's
coefficients, somebody cast the coefficients to double. So the largest products of the block run in double
precision, and their backward too. The basis cast to float32 once is exact enough for any forecast.
A good finding names the float64 products (or casts) of the basis, and their line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a float64 basis from numpy pulls the products with it into double precision",
    "FIX": "make the basis float32 once and leave the coefficients in float32",
}
SIZE, PAST, AHEAD = by_device(8192, 448), by_device(1024, 384), by_device(256, 128)
WIDTH, BLOCKS, WAVES = by_device(512, 64), by_device(8, 3), by_device(256, 96)


def waves(dtype):
    times = np.arange(PAST + AHEAD) / (PAST + AHEAD)
    angles = 2 * np.pi * np.arange(1, WAVES + 1)[:, None] * times
    basis = np.concatenate([np.cos(angles), np.sin(angles)]) / WAVES**0.5
    return torch.from_numpy(basis).to(device(), dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(PAST, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.weights = nn.Linear(WIDTH, 2 * WAVES)


class DoubleBlock(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("basis", waves(torch.float64))

    def forward(self, past):
        wave = self.weights(self.body(past)).double() @ self.basis  # guilty
        return wave.float().split([PAST, AHEAD], 1)


class SingleBlock(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("basis", waves(torch.float32))

    def forward(self, past):
        wave = self.weights(self.body(past)) @ self.basis
        return wave.split([PAST, AHEAD], 1)


def series():
    both = torch.randn(SIZE, PAST + AHEAD, device=device()).cumsum(1) * 0.1
    return both.split([PAST, AHEAD], 1)


def training(kind):
    torch.manual_seed(0)
    blocks = nn.ModuleList(kind() for _ in range(BLOCKS)).to(device())
    optimizer, batches = adamw(blocks), in_turn(series)

    def step():
        rest, future = next(batches)
        forecast = 0.0
        for block in blocks:
            seen, ahead = block(rest)
            rest, forecast = rest - seen, forecast + ahead
        loss = F.smooth_l1_loss(forecast, future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return training(DoubleBlock)


def clean():
    return training(SingleBlock)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
