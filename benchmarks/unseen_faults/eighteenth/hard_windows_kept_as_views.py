"""A model of sensor series puts the window with the largest error of each batch aside and mixes a few of
those into later batches. What is put aside is batch[i]: a view, which keeps the storage of its whole batch
alive. So a list of some hundred windows holds some hundred batches, and memory grows by a batch with every
step. A copy of the one window (clone) lets the batch go.
A good finding names what grows from step to step (the batches behind the kept windows), and the line that
keeps them.
"""

import collections
import random

import torch
from torch import nn

from common import adamw, by_device, device, main

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "windows put aside are views that keep their whole batches alive",
    "FIX": "append a clone of the window",
}
HOURS, SENSORS, LENGTH = by_device(500_000, 50_000), 16, by_device(1024, 512)
SIZE, EXTRA, KEPT = by_device(256, 128), 8, 192
PATCH, WIDTH = 16, by_device(512, 96)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(PATCH * SENSORS, WIDTH)
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.out = nn.Linear(WIDTH, PATCH * SENSORS)

    def forward(self, x):
        y = self.into(x.view(len(x), LENGTH // PATCH, -1))
        return self.out(y + self.body(y)).view_as(x)


def training(put_aside):
    torch.manual_seed(0)
    random.seed(0)
    series = torch.randn(HOURS, SENSORS, device=device())
    model = Denoiser().to(device())
    optimizer = adamw(model)
    kept = collections.deque(maxlen=KEPT)
    ahead = torch.arange(LENGTH, device=device())

    def step():
        starts = torch.randint(HOURS - LENGTH, (SIZE,), device=device())
        batch = series[starts[:, None] + ahead]
        both = batch
        if len(kept) >= EXTRA:
            both = torch.cat([batch, torch.stack(random.sample(kept, EXTRA))])
        errors = (model(both) - both).square().mean((1, 2))
        loss = errors.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        put_aside(kept, batch, int(errors[:SIZE].argmax()))
        return loss.detach()

    return step


def faulty():
    def put_aside(kept, batch, worst):
        kept.append(batch[worst])  # guilty

    return training(put_aside)


def clean():
    def put_aside(kept, batch, worst):
        kept.append(batch[worst].clone())

    return training(put_aside)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
