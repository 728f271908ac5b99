"""The parts of every block are timed with time.perf_counter(). The compiler cannot trace the clock:
the graph breaks at each of its calls, and what was one fused loop becomes several.
A good finding names the graph breaks, and the line that reads the clock.
"""

import time

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
    "CAUSE": "the clock is read between the parts of every block, which breaks the compiled graph at each reading",
    "FIX": "take the timers out, and use a profiler",
}
TIME, WIDTH, INNER, LAYERS = by_device(512, 64), by_device(2048, 512), by_device(256, 16), 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.full((WIDTH,), v)) for v in (1.0, 0.1))
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.times = {}
        self.compile()

    def tick(self, part):
        self.times[part] = time.perf_counter()  # guilty


class Timed(Block):
    def forward(self, x):
        y = x * self.scale + self.shift
        self.tick("scale")
        gate = F.hardsigmoid(1.702 * y)
        self.tick("gate")
        y = y * gate + F.relu(y) * (1 - gate)
        self.tick("mix")
        y = F.hardswish(y + self.shift) * self.scale
        self.tick("act")
        return x + self.out(F.silu(self.mix(y)))


class Untimed(Block):
    def forward(self, x):
        y = x * self.scale + self.shift
        gate = F.hardsigmoid(1.702 * y)
        y = y * gate + F.relu(y) * (1 - gate)
        y = F.hardswish(y + self.shift) * self.scale
        return x + self.out(F.silu(self.mix(y)))


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
        return in_turn(lambda: torch.randn(size, TIME, 16, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    return steplab.UserModel(Model(block), batches, loss, unit="sequences")


def faulty():
    return build(Timed)


def clean():
    return build(Untimed)
