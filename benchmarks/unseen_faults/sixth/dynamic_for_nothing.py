"""A transformer with windows is compiled with dynamic=True although every batch has the same shape.
With unknown sizes, the compiler cannot simplify the divisions by which windows are cut and joined, and
its code goes through them number by number.
A good finding names the slow compiled kernels or the shapes that never change, and the line that
compiles.
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
    "CPU_BATCH": 2,
    "CAUSE": "dynamic=True compiles for unknown sizes, with slow index arithmetic, although the shape never changes",
    "FIX": "leave dynamic at its default, which compiles for the sizes that come",
}
SIDE, WIDTH, LAYERS = by_device(64, 32), by_device(256, 64), by_device(6, 3)
WINDOW, CLASSES = 4, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WINDOW**2, WINDOW**2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        b, h, w, c = x.shape
        y = self.norm1(x).view(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c)
        y = y.permute(0, 1, 3, 5, 2, 4).reshape(-1, c, WINDOW**2)
        y = self.mix(y).view(b, h // WINDOW, w // WINDOW, c, WINDOW, WINDOW)
        x = x + y.permute(0, 1, 4, 2, 5, 3).reshape(b, h, w, c)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean((1, 2)))


def build(compiled):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, SIDE, SIDE, 3, device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(batch[0]), batch[1])

    model = Model()
    compiled(model)
    return steplab.UserModel(model, batches, loss, unit="images")


def faulty():
    return build(lambda model: model.compile(dynamic=True))  # guilty


def clean():
    return build(lambda model: model.compile())
