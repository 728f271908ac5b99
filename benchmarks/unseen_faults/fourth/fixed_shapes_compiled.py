"""The blocks are compiled with dynamic=False, while nearly every batch has another length: each new
one is compiled anew until the compiler's limit is reached, and from then on all others run eagerly.
A good finding names the recompilations, or that most steps run uncompiled, and the line that
compiles.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32,
    "CPU_BATCH": 12,
    "CAUSE": "dynamic=False compiles for one length at a time; after eight lengths the limit is reached and the rest runs eagerly",
    "FIX": "dynamic=True, or mark_dynamic on the length",
}
SHORTEST, STRIDE, LENGTHS = by_device(256, 96), by_device(16, 2), 40
WIDTH, INNER, LAYERS = by_device(2048, 256), by_device(256, 32), 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift, self.gate = (
            nn.Parameter(torch.full((WIDTH,), v)) for v in (1.0, 0.1, 0.1)
        )
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)


class Fixed(Block):  # forward is written twice since the compiler's limit is one per function
    def __init__(self):
        super().__init__()
        self.compile(dynamic=False)  # guilty

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        y = y * torch.sigmoid(1.702 * y) + torch.tanh(self.shift) * y
        return x + torch.sigmoid(self.gate) * self.out(self.mix(y))


class Dynamic(Block):
    def __init__(self):
        super().__init__()
        self.compile(dynamic=True)

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        y = y * torch.sigmoid(1.702 * y) + torch.tanh(self.shift) * y
        return x + torch.sigmoid(self.gate) * self.out(self.mix(y))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.Sequential(*(block() for _ in range(LAYERS)))

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


def build(block):
    my_turn()

    def batches(size):
        order = torch.randperm(LENGTHS, generator=torch.Generator().manual_seed(1))
        lengths = [SHORTEST + STRIDE * i for i in order.tolist()]
        ready = [torch.randn(size, n, 16, device=device()) for n in lengths]
        while True:
            yield from ready

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    return steplab.UserModel(Model(block), batches, loss, unit="sequences")


def faulty():
    return build(Fixed)


def clean():
    return build(Dynamic)
