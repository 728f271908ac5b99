"""The cell of a recurrent model enters autocast by itself, so the cast weights are forgotten when
it leaves and all weights are cast to bf16 again at every time step.
A good finding names the casts of the same weights, once per time step, and the line that enters
autocast inside the cell.
"""

from contextlib import nullcontext

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 8,
    "CAUSE": "autocast is entered in the cell and left at every time step, which empties its cache of cast weights: they are cast again each time",
    "FIX": "enter autocast once around the loop over time",
}
TIME, WIDTH, FEATURES = by_device(128, 16), by_device(2048, 1024), 16


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.state = nn.Linear(FEATURES, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, h):
        gate, new = (self.input(x) + self.state(h)).float().chunk(2, dim=-1)
        return torch.lerp(h, torch.tanh(new), torch.sigmoid(gate))


class CastingCell(Cell):
    def forward(self, x, h):
        with torch.autocast(device(), torch.bfloat16):  # guilty
            return super().forward(x, h)


class Recurrent(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell(), nn.Linear(WIDTH, FEATURES)

    def forward(self, x):
        h, states = torch.zeros(len(x), WIDTH, device=x.device), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            states.append(h)
        with torch.autocast(device(), torch.bfloat16):
            return self.head(torch.stack(states, dim=1))


def build(cell, precision):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME + 1, FEATURES, device=device()))

    def loss(model, x):
        with precision():
            y = model(x[:, :-1])
        return F.mse_loss(y.float(), x[:, 1:])

    return steplab.UserModel(Recurrent(cell), batches, loss, tokens_per_sequence=TIME)


def faulty():
    return build(CastingCell, nullcontext)


def clean():
    return build(Cell, lambda: torch.autocast(device(), torch.bfloat16))
