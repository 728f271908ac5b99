"""A patched transformer for time series is trained with a warmup and a cosine. The helper that makes the
whole schedule as an array, copied from a well-known repository, is called in the loop and indexed by
the step: hundreds of thousands of cosines are computed on the host in each step to read one of them.
A good finding names the schedule computed anew on the host in each step and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole learning-rate schedule is computed in every step to read one value",
    "FIX": "compute it once before the loop (or one value by its formula)",
}
STEPS, WARMUP, PEAK, END = 400_000, 10_000, 3e-4, 3e-6
BATCH, PATCHES, PATCH = by_device(256, 12), by_device(128, 48), 16
WIDTH, LAYERS = by_device(512, 128), by_device(6, 2)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.places = nn.Linear(PATCH, WIDTH), nn.Embedding(PATCHES, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)))
        self.norm, self.end = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, PATCH)

    def forward(self, patches):
        x = self.start(patches) + self.places.weight
        return self.end(self.norm(self.blocks(x)))


def cosine_schedule():
    warmup = np.linspace(0, PEAK, WARMUP)
    rest = np.arange(STEPS - WARMUP)
    decay = END + 0.5 * (PEAK - END) * (1 + np.cos(np.pi * rest / len(rest)))
    return np.concatenate([warmup, decay])


def looked_up_anew():
    return lambda count: cosine_schedule()[count]  # guilty


def looked_up():
    schedule = cosine_schedule()
    return lambda count: schedule[count]


def build(rates):
    rate = rates()
    model = Forecaster().to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randn(BATCH, PATCHES + 1, PATCH, device=device()))
    count = 0

    def step():
        nonlocal count
        count += 1
        for group in optimizer.param_groups:
            group["lr"] = float(rate(count))
        patches = next(data)
        with mixed():
            loss = F.huber_loss(model(patches[:, :-1]).float(), patches[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(looked_up_anew)


def clean():
    return build(looked_up)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
