"""The cell of a recurrent network is compiled, and a Python loop calls it at every time step. Each
call checks its guards and enters and leaves the graph, forward and backward, for very little work.
A good finding names the overhead of many calls of small compiled graphs, and the line of the loop
or of the compilation.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 32,
    "CAUSE": "the cell is compiled by itself and called at every time step, instead of compiling the loop over time",
    "FIX": "compile the function that has the loop",
}
TIME, INPUTS, WIDTH = 24, 32, by_device(1024, 160)


class Cell(nn.Module):
    """A recurrence without matrices: each channel has its own gates."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(0.1 * torch.randn(3, WIDTH))

    def forward(self, h, z, r, n):
        a, b, c = self.weights
        z, r = torch.sigmoid(z + a * h), torch.sigmoid(r + b * h)
        return (1 - z) * h + z * torch.tanh(n + c * r * h)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()
        self.gates = nn.Linear(WIDTH, 3 * WIDTH)

    def scan(self, gates):
        h, out = torch.zeros_like(gates[:, 0, :WIDTH]), []
        for t in range(TIME):
            h = self.cell(h, *gates[:, t].chunk(3, -1))
            out.append(h)
        return torch.stack(out, 1)

    def forward(self, x):
        return x + self.scan(self.gates(x))


class CellCompiled(Layer):
    def __init__(self):
        super().__init__()
        self.cell.compile()  # guilty


class LoopCompiled(Layer):
    def __init__(self):
        super().__init__()
        self.scan = torch.compile(self.scan)


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.enter, self.head = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, INPUTS)
        self.layers = nn.Sequential(layer(), layer())

    def forward(self, x):
        return self.head(self.layers(self.enter(x)))


def build(layer):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME, INPUTS, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x)[:, :-1], x[:, 1:])

    return steplab.UserModel(Model(layer), batches, loss, unit="sequences")


def faulty():
    return build(CellCompiled)


def clean():
    return build(LoopCompiled)
