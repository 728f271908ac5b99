"""A residual net is trained on a table that came out of NumPy as float64. The first step failed with
"mat1 and mat2 must have the same dtype", and the quickest answer was to make the model double too:
everything runs in float64 since, at half the speed or less, on measurements with four digits.
A good finding names float64 in the model's products (or its weights) and the line that made it double.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the model runs in float64 because the NumPy table was float64",
    "FIX": "turn the table into float32 instead",
}
BATCH, COLUMNS = by_device(8192, 512), by_device(128, 64)
WIDTH, LAYERS, ROWS = by_device(1024, 192), by_device(6, 4), 20_000


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


def table_of_measurements():
    random = np.random.default_rng(0)
    return random.standard_normal((ROWS, COLUMNS)), random.standard_normal((ROWS, 1))


def as_the_table(model, table, wanted):
    return model.double(), torch.from_numpy(table), torch.from_numpy(wanted)  # guilty


def as_the_model(model, table, wanted):
    return model, torch.from_numpy(table).float(), torch.from_numpy(wanted).float()


def build(matched):
    start, end = nn.Linear(COLUMNS, WIDTH), nn.Linear(WIDTH, 1)
    model = nn.Sequential(start, *(Residual() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), end)
    model, table, wanted = matched(model, *table_of_measurements())
    model, table, wanted = model.to(device()), table.to(device()), wanted.to(device())
    optimizer = adamw(model)
    order = torch.randperm(ROWS, device=device()).split(BATCH)[: ROWS // BATCH]
    count = 0

    def step():
        nonlocal count
        rows = order[count % len(order)]
        count += 1
        with mixed():
            loss = F.mse_loss(model(table[rows]), wanted[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(as_the_table)


def clean():
    return build(as_the_model)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
