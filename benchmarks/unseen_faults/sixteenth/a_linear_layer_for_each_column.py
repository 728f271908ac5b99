"""A net for tabular data embeds each numeric column by a weight vector and a bias of its own, then an MLP
reads them all. The embedding was written as a list of nn.Linear(1, width), one per column, called in
a loop and stacked; it is one product of the table with a matrix, element by element.
A good finding names the loop over columns of tiny linear layers (many small calls) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a loop calls one nn.Linear(1, width) for each column of the table",
    "FIX": "x[..., None] * weight + bias for all columns at once",
}
BATCH, COLUMNS, WIDTH = by_device(4096, 256), by_device(200, 160), by_device(64, 16)
HIDDEN = by_device(1024, 384)


class ColumnByColumn(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return torch.stack([f(x[:, i, None]) for i, f in enumerate(self.layers)], 1)  # guilty


class AllColumns(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.weight = nn.Parameter(torch.stack([f.weight.detach()[:, 0] for f in layers]))
        self.bias = nn.Parameter(torch.stack([f.bias.detach() for f in layers]))

    def forward(self, x):
        return torch.addcmul(self.bias, x[..., None], self.weight)


def build(embedding):
    model = nn.Sequential(
        embedding([nn.Linear(1, WIDTH) for _ in range(COLUMNS)]),
        nn.Flatten(),
        nn.ReLU(),
        nn.Linear(COLUMNS * WIDTH, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, 1),
    ).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, COLUMNS, device=device()),
            torch.randn(BATCH, 1, device=device()),
        )
    )

    def step():
        x, wanted = next(data)
        with mixed():
            loss = F.mse_loss(model(x).float(), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(ColumnByColumn)


def clean():
    return build(AllColumns)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
