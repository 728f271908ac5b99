"""A table comes from a data frame, whose to_numpy() lies in memory column by column, and torch keeps
that order. Every row of a batch is therefore gathered from hundreds of places far apart.
A good finding names the slow lookup of the batch's rows, or the order of the table, and its line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the table lies column by column in memory, so that the rows of a batch are gathered number by number",
    "FIX": "make it contiguous once: np.ascontiguousarray",
}
ROWS, FEATURES = by_device(500_000, 200_000), by_device(512, 128)
BATCH, WIDTH = by_device(16_384, 8192), by_device(1024, 64)


def table_of_frame():
    chance = np.random.default_rng(0)
    columns = chance.standard_normal((FEATURES, ROWS), dtype=np.float32)
    return columns.T  # what to_numpy() of a data frame of numbers is


def by_columns():
    return torch.from_numpy(table_of_frame())


def by_rows():
    return torch.from_numpy(np.ascontiguousarray(table_of_frame()))


def build(load):
    table = load().to(device())
    target = table[:, :8].square().sum(1, keepdim=True)
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 1),
    ).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        numbers = torch.randint(ROWS, (BATCH,), device=device())
        rows, goal = table[numbers], target[numbers]  # guilty
        with mixed():
            loss = F.mse_loss(model(rows), goal)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(by_columns)


def clean():
    return build(by_rows)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
