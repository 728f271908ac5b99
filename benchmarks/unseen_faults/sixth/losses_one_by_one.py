"""To find wrong labels, the last loss of every training row is remembered. It is written to a dict
row by row, with an item() for each of them.
A good finding names the thousands of values that are read one by one on the host, and the line that
reads them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the losses of all rows of the batch are read with item() one by one",
    "FIX": "keep them in a tensor and write all rows of a batch at once",
}
BATCH, FEATURES, WIDTH, CLASSES = by_device(4096, 8192), 32, by_device(4096, 128), 10
ROWS = 100_000


def prepare():
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    ).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = in_turn(
        lambda: (
            torch.randint(ROWS, (BATCH,), device=device()),
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    return model, optimizer, data


def update(model, optimizer, x, y):
    with mixed():
        losses = F.cross_entropy(model(x), y, reduction="none")
    losses.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return losses.detach()


def faulty():
    model, optimizer, data = prepare()
    last = {}

    def step():
        rows, x, y = next(data)
        losses = update(model, optimizer, x, y)
        for row, loss in zip(rows, losses, strict=True):
            last[row.item()] = loss.item()  # guilty
        return losses.mean()

    return step


def clean():
    model, optimizer, data = prepare()
    last = torch.zeros(ROWS, device=device())

    def step():
        rows, x, y = next(data)
        losses = update(model, optimizer, x, y)
        last[rows] = losses
        return losses.mean()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
