"""Every block looks whether its states have overflowed and clamps them if so, as an old trick for
fp16 has it. The branch depends on data, so the compiled graph breaks at it in every block.
A good finding names the graph break, or on a GPU the wait for the answer, and the line of the
branch.
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
    "CPU_BATCH": 20,
    "CAUSE": "a branch on the values of a tensor breaks the compiled graph in every block",
    "FIX": "no check: fp32 and bf16 do not overflow here; or clamp without asking",
}
TIME, WIDTH, INNER, LAYERS = by_device(1024, 128), by_device(1024, 256), by_device(128, 16), 3
LIMIT = 6e4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift, self.gate = (
            nn.Parameter(torch.full((WIDTH,), v)) for v in (1.0, 0.1, 0.1)
        )
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)


class Asking(Block):
    def limited(self, y):
        if not torch.isfinite(y).all():  # guilty
            y = y.clamp(-LIMIT, LIMIT)
        return y

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        y = self.limited(y + self.shift)
        y = self.limited(y * F.relu(y) + self.gate * y)
        return self.limited(x + self.out(self.mix(y)))


class Trusting(Block):
    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        y = y + self.shift
        y = y * F.relu(y) + self.gate * y
        return x + self.out(self.mix(y))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
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
    return build(Asking)


def clean():
    return build(Trusting)
