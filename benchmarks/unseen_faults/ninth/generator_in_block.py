"""Every compiled block draws noise at three places with a torch.Generator of its own, for the sake of
reproducibility. The compiler cannot trace a generator, so each block is cut at every draw and fuses
less.
A good finding names the break of the compiled graph and the line of the draw.
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
    "CAUSE": "noise is drawn with a torch.Generator inside the compiled block, which breaks its graph",
    "FIX": "draw the noise outside of the compiled block and pass it as an argument",
}
TIME, WIDTH, INNER, LAYERS = by_device(512, 64), by_device(4096, 512), by_device(256, 16), 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.full((WIDTH,), v)) for v in (1.0, 0.1))
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.generator = torch.Generator(device()).manual_seed(0)
        self.compile()

    def draw(self, x):
        return 0.1 * torch.randn(
            *x.shape[:2], 1, generator=self.generator, device=x.device
        )  # guilty


class Inside(Block):
    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        gate = torch.sigmoid(y + self.shift + self.draw(x))
        y = y * gate + F.relu(y) * (1 - gate)
        y = y * (1 + self.draw(x)) - 0.5 * gate * y.abs()
        return x + self.out(F.silu(self.mix(y + self.draw(x) * gate)))


class Outside(Block):
    def forward(self, x, first, second, third):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        gate = torch.sigmoid(y + self.shift + first)
        y = y * gate + F.relu(y) * (1 - gate)
        y = y * (1 + second) - 0.5 * gate * y.abs()
        return x + self.out(F.silu(self.mix(y + third * gate)))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            noise = [block.draw(h) for _ in range(3)] if isinstance(block, Outside) else []
            h = block(h, *noise)
        return self.head(h)


def build(block):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME, 16, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    return steplab.UserModel(Model(block), batches, loss, unit="sequences")


def faulty():
    return build(Inside)


def clean():
    return build(Outside)
