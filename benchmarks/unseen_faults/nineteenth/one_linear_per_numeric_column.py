"""A classifier of loan applications gives every numeric column a vector of its own before an MLP reads them
all, as the transformers for tables do. The vectors come from a ModuleList with one nn.Linear(1, width)
for each column, called one after another: hundreds of tiny products, in the forward pass, in the
backward pass and as weights of the optimizer, where one multiplication by a matrix of all columns does.
A good finding names the many tiny linear layers (or their kernels) and the line that calls them in turn.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "every numeric column goes through a Linear(1, width) of its own in a Python loop",
    "FIX": "hold the columns' weights in one (columns, width) parameter: x[..., None] * weight + bias",
    "BATCH": 4096,
    "CPU_BATCH": 256,
}
COLUMNS, CLASSES = by_device(240, 144), 2
WIDTH, HIDDEN = by_device(32, 12), by_device(1024, 256)


class ColumnByColumn(nn.Module):
    def __init__(self):
        super().__init__()
        self.columns = nn.ModuleList(nn.Linear(1, WIDTH) for _ in range(COLUMNS))

    def forward(self, x):
        parts = [part(x[:, i : i + 1]) for i, part in enumerate(self.columns)]  # guilty
        return torch.stack(parts, 1)


class AllColumns(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(COLUMNS, WIDTH).uniform_(-1, 1))
        self.bias = nn.Parameter(torch.empty(COLUMNS, WIDTH).uniform_(-1, 1))

    def forward(self, x):
        return x[..., None] * self.weight + self.bias


class LoanNet(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.columns = columns
        self.body = nn.Sequential(
            nn.Linear(COLUMNS * WIDTH, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.head(self.body(F.relu(self.columns(x)).flatten(1)))


def applications(size):
    def batch():
        rows = torch.randn(size, COLUMNS, device=device())
        return rows, torch.randint(CLASSES, (size,), device=device())

    return in_turn(batch)


def loss(model, batch):
    rows, repaid = batch
    with mixed():
        return F.cross_entropy(model(rows), repaid)


def faulty():
    return steplab.UserModel(LoanNet(ColumnByColumn()), applications, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(LoanNet(AllColumns()), applications, loss, optimizer=adamw)
