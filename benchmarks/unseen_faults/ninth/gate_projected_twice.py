"""The gated layer spells out SiLU as gate(x) * sigmoid(gate(x)) and so calls the linear layer of the
gate twice on the same input, forward and backward.
A good finding names the projection that is computed twice, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 8192,
    "CPU_BATCH": 512,
    "CAUSE": "the gate's linear layer runs twice on the same input because SiLU is spelled out",
    "FIX": "call F.silu on the result of one projection",
}
COLUMNS, WIDTH, LAYERS = 48, by_device(1024, 128), by_device(8, 4)


class Gated(nn.Module):
    """One residual block of a tabular network."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)


class Twice(Gated):
    def forward(self, x):
        y = self.norm(x)
        y = self.gate(y) * torch.sigmoid(self.gate(y)) * self.up(y)  # guilty
        return x + self.down(y)


class Once(Gated):
    def forward(self, x):
        y = self.norm(x)
        y = F.silu(self.gate(y)) * self.up(y)
        return x + self.down(y)


class Tabular(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed = nn.Linear(COLUMNS, WIDTH)
        self.blocks = nn.Sequential(*(block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embed(x)))).squeeze(-1)


def build(block):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, COLUMNS, device=device()),
                torch.randn(size, device=device()),
            )
        )

    def loss(model, batch):
        x, price = batch
        with mixed():
            return F.mse_loss(model(x), price)

    return steplab.UserModel(Tabular(block), batches, loss, unit="rows")


def faulty():
    return build(Twice)


def clean():
    return build(Once)
