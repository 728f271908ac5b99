"""The gate of every block is decorated with torch.compiler.disable, left over from a hunt for a
bug: each compiled block is cut in two, and the gate's many elementwise operators run one by one.
A good finding names the break of the graph or the function that runs uncompiled, and the line.
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
    "CPU_BATCH": 16,
    "CAUSE": "torch.compiler.disable was left on the gate, whose operators run eagerly and cut each compiled block in two",
    "FIX": "remove the decorator",
}
TIME, WIDTH, INNER, LAYERS = by_device(512, 96), by_device(2048, 256), by_device(256, 32), 3


def gate(x, scale, shift):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale
    return y * torch.sigmoid(1.702 * y) + torch.tanh(shift) * y


debugged = torch.compiler.disable(gate)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.full((WIDTH,), v)) for v in (1.0, 0.1))
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.compile()


class Debugged(Block):
    def forward(self, x):
        y = debugged(x, self.scale, self.shift)  # guilty
        return x + self.out(F.silu(self.mix(y)))


class Whole(Block):
    def forward(self, x):
        y = gate(x, self.scale, self.shift)
        return x + self.out(F.silu(self.mix(y)))


def build(block):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME, 16, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    model = nn.Sequential(
        nn.Linear(16, WIDTH), *(block() for _ in range(LAYERS)), nn.Linear(WIDTH, 16)
    )
    return steplab.UserModel(model, batches, loss, TIME)


def faulty():
    return build(Debugged)


def clean():
    return build(Whole)
