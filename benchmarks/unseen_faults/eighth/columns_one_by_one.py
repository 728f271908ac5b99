"""A recommender's batch is a dictionary with one tensor per categorical column, 400 of them. Each
column is moved to the GPU by a call of its own, 400 small blocking copies from pageable memory.
The twin's loader gives all columns as one pinned tensor, which takes one copy.
On a CPU there is nothing to copy, so the twins hardly differ there.
A good finding names the many small copies to the device (or their waits), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "each of 400 columns of the batch is copied to the device on its own, blocking",
    "FIX": "stack the columns in the loader, pin the batch and copy it once, non_blocking",
}
BATCH, COLUMNS, VALUES = by_device(4096, 512), by_device(400, 60), by_device(1000, 100)
DIM, WIDTH = by_device(16, 8), by_device(4096, 512)


class Model(nn.Module):
    """One table for all columns, then a wide network."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(COLUMNS * VALUES, DIM)
        self.register_buffer("first", torch.arange(COLUMNS) * VALUES)
        self.deep = nn.Sequential(
            nn.Linear(COLUMNS * DIM, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, ids):
        return self.deep(self.table(ids + self.first).flatten(1)).squeeze(-1)


def drawn():
    """Return a batch as it lies on the host, one row per sample."""
    return torch.randint(VALUES, (BATCH, COLUMNS)), torch.randint(2, (BATCH,)).float()


def as_columns():
    ids, clicked = drawn()
    return {f"c{i}": ids[:, i].contiguous() for i in range(COLUMNS)}, clicked


def as_one():
    ids, clicked = drawn()
    return (ids.pin_memory(), clicked.pin_memory()) if device() == "cuda" else (ids, clicked)


def prepare(batch):
    model = Model().to(device())
    return model, adamw(model), in_turn(batch)


def train(model, optimizer, ids, clicked):
    with mixed():
        loss = F.binary_cross_entropy_with_logits(model(ids).float(), clicked)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare(as_columns)

    def step():
        columns, clicked = next(data)
        columns = {name: column.to(device()) for name, column in columns.items()}  # guilty
        ids = torch.stack(list(columns.values()), 1)
        return train(model, optimizer, ids, clicked.to(device()))

    return step


def clean():
    model, optimizer, data = prepare(as_one)

    def step():
        ids, clicked = (v.to(device(), non_blocking=True) for v in next(data))
        return train(model, optimizer, ids, clicked)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
