"""A looped transformer applies one block eight times. Its output projection is kept orthogonal by
a parametrization, so each access to the weight computes a matrix exponential, and the backward pass
one of twice the size: eight times a step for one and the same weight.
A good finding names the exponential that is repeated, at the line that asks for the weight in the loop.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the orthogonal weight of the shared block is computed anew at each of its eight uses",
    "FIX": "take the weight once before the loop, or run it under torch.nn.utils.parametrize.cached()",
}
BATCH, TIME = by_device(64, 6), by_device(256, 32)
WIDTH, HEADS, LOOPS = by_device(768, 96), by_device(12, 3), 8
FEATURES = by_device(64, 8)


class Orthogonal(nn.Module):
    def forward(self, free):
        upper = free.triu(1)
        with torch.autocast(free.device.type, enabled=False):
            return torch.linalg.matrix_exp(upper - upper.T)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.proj.weight, std=WIDTH**-0.5)
        parametrize.register_parametrization(self.proj, "weight", Orthogonal(), unsafe=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, rotation):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(y.transpose(1, 2).flatten(2), rotation, self.proj.bias)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def loop_and_rebuild(block, x):
    for _ in range(LOOPS):
        rotation = block.proj.weight  # guilty
        x = block(x, rotation)
    return x


def loop_with_one(block, x):
    rotation = block.proj.weight
    for _ in range(LOOPS):
        x = block(x, rotation)
    return x


class Looped(nn.Module):
    def __init__(self, loop):
        super().__init__()
        self.loop = loop
        self.enter, self.leave = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, FEATURES)
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.leave(self.norm(self.loop(self.block, self.enter(x))))


def build(loop):
    model = Looped(loop).to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randn(BATCH, TIME + 1, FEATURES, device=device()))

    def step():
        series = next(data)
        with mixed():
            loss = F.mse_loss(model(series[:, :-1]).float(), series[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(loop_and_rebuild)


def clean():
    return build(loop_with_one)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
