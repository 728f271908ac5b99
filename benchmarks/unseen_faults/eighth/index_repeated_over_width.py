"""Each expert chooses its tokens. The numbers of the tokens are repeated over the whole width, as
torch.gather and scatter_add want them: an int64 tensor of rows x width, four times as large as the
states themselves, is written, read four times and kept for the backward. index_select and index_add
take one number per row.
A good finding names the repeated index (or gather and scatter over whole rows) and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32,
    "CPU_BATCH": 12,
    "CAUSE": "the numbers of the chosen tokens are repeated over the width for gather and scatter_add: an int64 tensor four times as large as the states",
    "FIX": "index_select and index_add with one number per row",
}
TIME, WIDTH, HIDDEN = by_device(1024, 128), by_device(1024, 256), by_device(512, 32)
EXPERTS, LAYERS, INPUTS = by_device(16, 4), by_device(4, 2), 32


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, x):
        states = self.norm(x).flatten(0, 1)
        scores = self.router(states)
        states = states.to(scores.dtype)
        room = 2 * len(states) // EXPERTS
        gate, chosen = scores.float().softmax(1).T.contiguous().topk(room, 1)
        return x + self.route(states, gate.to(states.dtype), chosen.flatten()).view_as(x)

    def experts(self, rows, gate):
        y = torch.bmm(F.gelu(torch.bmm(rows.view(EXPERTS, -1, WIDTH), self.up)), self.down)
        return (y * gate.unsqueeze(-1)).flatten(0, 1)


class Repeated(Mixture):
    def route(self, states, gate, chosen):
        index = chosen.unsqueeze(1).repeat(1, WIDTH)  # guilty
        y = self.experts(states.gather(0, index), gate)
        return torch.zeros_like(states).scatter_add(0, index, y)


class ByRow(Mixture):
    def route(self, states, gate, chosen):
        y = self.experts(states.index_select(0, chosen), gate)
        return torch.zeros_like(states).index_add(0, chosen, y)


class Model(nn.Module):
    def __init__(self, mixture):
        super().__init__()
        self.embed, self.head = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, INPUTS)
        self.layers = nn.Sequential(*[mixture() for _ in range(LAYERS)])

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


def build(mixture):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME, INPUTS, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x).float(), x)

    return steplab.UserModel(Model(mixture), batches, loss, unit="sequences")


def faulty():
    return build(Repeated)


def clean():
    return build(ByRow)
