"""A forecaster of many sensors cuts random windows out of one long array for each batch. The windows are
views of a NumPy array, and the list of them goes into torch.tensor, which walks through every number
as a Python object; torch even warns of it, once, in a log that nobody reads.
A good finding names the tensor made of a list of arrays (the slow conversion on the host) and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "each batch is made by torch.tensor of a list of NumPy arrays",
    "FIX": "np.stack the windows, then torch.from_numpy",
}
BATCH, PAST, FUTURE = by_device(256, 32), by_device(336, 96), by_device(96, 24)
SENSORS, WIDTH, POINTS = by_device(32, 8), by_device(1024, 768), 50_000


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(PAST, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.Linear(WIDTH, FUTURE),
        )

    def forward(self, past):
        return self.net(past.transpose(1, 2)).transpose(1, 2)


def by_number(windows):
    return torch.tensor(windows)  # guilty


def by_stack(windows):
    return torch.from_numpy(np.stack(windows))


def build(tensor_of):
    random = np.random.default_rng(0)
    series = random.standard_normal((POINTS, SENSORS), dtype=np.float32)
    model = Forecaster().to(device())
    optimizer = adamw(model)

    def step():
        starts = random.integers(POINTS - PAST - FUTURE, size=BATCH)
        batch = tensor_of([series[s : s + PAST + FUTURE] for s in starts]).to(device())
        with mixed():
            loss = F.mse_loss(model(batch[:, :PAST]).float(), batch[:, PAST:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(by_number)


def clean():
    return build(by_stack)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
