"""A neural field of sound pressure has compiled blocks, whose activation has a sharpness that the
script raises as the training goes on. It lies in a buffer, and the block turns it into a Python
number with float(): this breaks the compiled graph in the middle of every block, so that what would
be one kernel becomes two with a wide tensor between them, and the host waits for the device each
time. The buffer can be used as it is.
A good finding names float() of a tensor (or the graph break, or the wait) in the compiled block and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32768,
    "CPU_BATCH": 64,
    "CAUSE": "the compiled block reads a buffer with float(), which breaks its graph in two and waits for the device",
    "FIX": "use the buffer as a tensor in the formula",
}
WIDTH, HIDDEN, BLOCKS = by_device(128, 32), by_device(512, 64), by_device(32, 64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )
        self.register_buffer("sharpness", torch.tensor(1.5))

    def bend(self, h, sharpness):
        """Add a periodic part, and normalize the result."""
        h = h + torch.sin(sharpness * h).square() / sharpness
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)


class Number(Block):
    def forward(self, x):
        a, b = self.up(self.norm(x)).chunk(2, -1)
        h = a * b.sigmoid()
        sharpness = float(self.sharpness)  # guilty
        return x + self.down(self.bend(h, sharpness))


class Buffer(Block):
    def forward(self, x):
        a, b = self.up(self.norm(x)).chunk(2, -1)
        h = a * b.sigmoid()
        return x + self.down(self.bend(h, self.sharpness))


class Field(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        for block in self.blocks:
            block.compile()

    def forward(self, points):
        x = self.embed(points)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def build(block):
    my_turn()

    def batch(size):
        return torch.rand(size, 4, device=device()), torch.randn(size, device=device())

    def loss(model, pair):
        with mixed():
            return F.mse_loss(model(pair[0]).float(), pair[1])

    return steplab.UserModel(
        Field(block), lambda size: in_turn(lambda: batch(size)), loss, unit="points"
    )


def faulty():
    return build(Number)


def clean():
    return build(Buffer)
