"""A compiled block appends its auxiliary loss to a list of its own, which nobody empties. The
compiler has the list's length in a guard, so it compiles anew in every step, and after its limit
the block runs eagerly.
A good finding names the recompilations, or that the block runs uncompiled, and the line of the
list.
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
    "CPU_BATCH": 16,
    "CAUSE": "the compiled block appends to a list that grows, so it is compiled anew until the limit and then runs eagerly",
    "FIX": "keep the last value alone, or return it",
}
TIME, WIDTH, INNER = by_device(512, 64), by_device(4096, 768), by_device(256, 32)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.full((WIDTH,), v)) for v in (1.0, 0.1))
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.aux = []
        self.compile()


class Growing(Block):
    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        gate = torch.sigmoid(1.702 * y + self.shift)
        self.aux.append(gate.detach().mean())  # guilty
        y = y * gate + torch.tanh(y) * (1 - gate)
        return x + self.out(F.silu(self.mix(y)))


class Last(Block):
    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        gate = torch.sigmoid(1.702 * y + self.shift)
        self.aux = gate.detach().mean()
        y = y * gate + torch.tanh(y) * (1 - gate)
        return x + self.out(F.silu(self.mix(y)))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(16, WIDTH), block(), nn.Linear(WIDTH, 16)

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


def build(block):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME, 16, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    return steplab.UserModel(Model(block), batches, loss, unit="sequences")


def faulty():
    return build(Growing)


def clean():
    return build(Last)
