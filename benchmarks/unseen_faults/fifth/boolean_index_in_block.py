"""A masked batch norm takes the mean and the variance of x[mask], whose size only the values tell:
the compiled graph ends there, in every block, and the rest of the block is another graph.
A good finding names the break of the graph, or the indexing with a mask, and its line.
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
    "CPU_BATCH": 10,
    "CAUSE": "x[mask] in every block has a size that depends on values, which breaks the compiled graph and copies rows",
    "FIX": "sums weighted by the mask, divided by their number",
}
TIME, WIDTH, INNER, LAYERS = by_device(512, 96), by_device(1024, 384), by_device(256, 16), 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.compile()

    def rest(self, x, mean, variance):
        y = (x - mean) * torch.rsqrt(variance + 1e-5) * self.scale + self.shift
        return x + self.out(F.silu(self.mix(y * torch.sigmoid(1.702 * y))))


class Indexed(Block):
    def forward(self, x, mask):
        mean, variance = x[mask].mean(0), x[mask].var(0, correction=0)  # guilty
        return self.rest(x, mean, variance)


class Weighted(Block):
    def forward(self, x, mask):
        weight = mask[..., None].to(x.dtype)
        number = weight.sum()
        mean = (x * weight).sum((0, 1)) / number
        return self.rest(x, mean, ((x - mean).square() * weight).sum((0, 1)) / number)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))

    def forward(self, x, mask):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def build(block):
    my_turn()

    def batch(size):
        lengths = torch.randint(TIME // 2, TIME + 1, (size, 1))
        return torch.randn(size, TIME, 16, device=device()), (torch.arange(TIME) < lengths).to(
            device()
        )

    def loss(model, batch):
        x, mask = batch
        with mixed():
            wrong = F.mse_loss(model(x, mask), x, reduction="none").mean(-1)
            return (wrong * mask).sum() / mask.sum()

    return steplab.UserModel(Model(block), lambda size: in_turn(lambda: batch(size)), loss, TIME)


def faulty():
    return build(Indexed)


def clean():
    return build(Weighted)
