"""Each block knows its number and divides its branch by the root of it. To the compiler the number
is a constant, so every block is compiled on its own, and beyond its limit of eight the rest of the
blocks run eagerly.
A good finding names the blocks that run uncompiled, or the recompilations, and the line that uses
the number.
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
    "CPU_BATCH": 8,
    "CAUSE": "the layer's number, an int of the module, makes the compiler compile every block anew; beyond eight they run eagerly",
    "FIX": "keep the factor as a tensor, which all blocks' graphs take as an input",
}
TIME, WIDTH, INNER, LAYERS = by_device(1024, 64), by_device(1024, 128), by_device(128, 16), 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift, self.gate = (
            nn.Parameter(torch.full((WIDTH,), v)) for v in (1.0, 0.1, 0.1)
        )
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)


class ByNumber(Block):  # forward is written twice since the compiler's limit is one per function
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        y = y * torch.sigmoid(1.702 * y) + torch.tanh(self.shift) * y
        y = torch.sigmoid(self.gate) * self.out(self.mix(y * torch.tanh(y)))
        return x + y / (self.number + 1) ** 0.5  # guilty


class ByTensor(Block):
    def __init__(self, number):
        super().__init__()
        self.register_buffer("factor", torch.tensor((number + 1) ** -0.5))

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        y = y * torch.sigmoid(1.702 * y) + torch.tanh(self.shift) * y
        y = torch.sigmoid(self.gate) * self.out(self.mix(y * torch.tanh(y)))
        return x + y * self.factor


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(block(i) for i in range(LAYERS))
        for block in self.blocks:
            block.compile()

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def build(block):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME, 16, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    return steplab.UserModel(Model(block), batches, loss, TIME)


def faulty():
    return build(ByNumber)


def clean():
    return build(ByTensor)
