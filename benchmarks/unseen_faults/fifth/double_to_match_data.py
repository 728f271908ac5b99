"""The table comes from numpy as float64, and a linear layer complained about its type. The model
was made double to match it, so all of the training is in double precision.
A good finding names the products in double precision, and the line that makes the model double (or
one that computes in it).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole model was made double because the data came from numpy as float64",
    "FIX": "convert the data to float32 once",
}
BATCH, FEATURES, WIDTH = by_device(4096, 640), by_device(256, 64), by_device(2048, 448)


def network():
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, 1),
    )


def build(model, x, y):
    x, y, model = x.to(device()), y.to(device()), model.to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    numbers = 0

    def step():
        nonlocal numbers
        rows = slice(numbers, numbers + BATCH)
        numbers = (numbers + BATCH) % len(x)
        loss = F.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def table():
    x = np.random.default_rng(1).standard_normal((16 * BATCH, FEATURES))
    y = np.tanh(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    return torch.from_numpy(x), torch.from_numpy(y)


def faulty():
    x, y = table()
    model = network().double()  # guilty
    return build(model, x, y)


def clean():
    x, y = table()
    return build(network(), x.float(), y.float())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
