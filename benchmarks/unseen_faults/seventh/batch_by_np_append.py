"""The collate function appends one sample after the other to the batch with np.append, which copies
everything that is already there each time.
A good finding names the step's wait for its batch, and the line of np.append.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the batch is grown by np.append, which copies all earlier samples for each new one",
    "FIX": "np.stack of all samples at once",
}
BATCH, TIME, FEATURES, WIDTH = by_device(256, 384), by_device(256, 128), 24, by_device(1024, 64)
SAMPLES = by_device(2048, 512)


def faulty_collate(samples):
    batch = np.empty((0, TIME, FEATURES), dtype=np.float32)
    for sample in samples:
        batch = np.append(batch, sample[None], axis=0)  # guilty
    return torch.from_numpy(batch)


def clean_collate(samples):
    return torch.from_numpy(np.stack(samples))


def forever(loader):
    while True:
        yield from loader


def build(collate):
    model = nn.Sequential(
        nn.Conv1d(FEATURES, WIDTH, 8, 4),
        nn.ReLU(),
        nn.Conv1d(WIDTH, WIDTH, 5, 2, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(WIDTH, FEATURES),
    ).to(device())
    optimizer = adamw(model)
    samples = list(np.random.default_rng(0).random((SAMPLES, TIME, FEATURES), dtype=np.float32))
    batches = forever(DataLoader(samples, BATCH, collate_fn=collate, drop_last=True))

    def step():
        series = next(batches).to(device())
        with mixed():
            guess = model(series[:, :-1].transpose(1, 2))
            loss = F.mse_loss(guess, series[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(faulty_collate)


def clean():
    return build(clean_collate)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
