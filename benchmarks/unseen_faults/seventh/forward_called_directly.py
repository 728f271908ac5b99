"""Every block is compiled in place with block.compile(), but the model runs block.forward(x) instead
of block(x). Only a call of the module goes through the compiler, so all blocks run eagerly.
A good finding names that the compiled blocks run uncompiled, or their unfused elementwise work, and
the line that calls forward.
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
    "CAUSE": "the blocks are compiled, but block.forward(x) goes past the compiled call and runs eagerly",
    "FIX": "call the module: block(x)",
}
TIME, WIDTH, INNER, LAYERS = by_device(512, 64), by_device(2048, 512), by_device(256, 32), 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.full((WIDTH,), v)) for v in (1.0, 0.1))
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.compile()

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        gate = torch.sigmoid(1.702 * y + self.shift)
        y = y * gate + torch.tanh(y) * (1 - gate)
        return x + self.out(F.silu(self.mix(y)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))


class Direct(Model):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block.forward(x)  # guilty
        return self.head(x)


class Called(Model):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(model):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME, 16, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    return steplab.UserModel(model(), batches, loss, unit="sequences")


def faulty():
    return build(Direct)


def clean():
    return build(Called)
