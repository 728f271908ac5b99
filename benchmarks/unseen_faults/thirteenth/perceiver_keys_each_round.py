"""A Perceiver reads a long series of radar returns with a few latent vectors, in several rounds. All
rounds share one cross-attention, and the series does not change between them: yet every round
normalizes the series and projects it to keys and values again. Once per forward gives the same.
A good finding names the repeated projection of the same inputs to keys and values, and the line.
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
    "CAUSE": "every round of a Perceiver normalizes and projects the same inputs to the same keys and values, although all rounds share the weights",
    "FIX": "compute keys and values once before the rounds",
}
TIME, FEATURES, WIDTH = by_device(4096, 512), 32, by_device(512, 64)
LATENTS, ROUNDS, HEADS, CLASSES = by_device(256, 32), by_device(6, 4), by_device(8, 2), 20


def split(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Cross(nn.Module):
    """Latents attend to the series."""

    def __init__(self):
        super().__init__()
        self.norm_x, self.norm_z = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def keys(self, x):
        k, v = self.kv(self.norm_x(x)).chunk(2, -1)
        return split(k), split(v)

    def forward(self, z, k, v):
        y = F.scaled_dot_product_attention(split(self.q(self.norm_z(z))), k, v)
        return z + self.proj(y.transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Latents attend to each other."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, z):
        q, k, v = (split(part) for part in self.qkv(self.norm1(z)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        z = z + self.proj(y.transpose(1, 2).flatten(2))
        return z + self.down(F.gelu(self.up(self.norm2(z))))


class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.positions = nn.Parameter(torch.randn(TIME, WIDTH) * 0.02)
        self.latents = nn.Parameter(torch.randn(LATENTS, WIDTH) * 0.02)
        self.cross, self.latent = Cross(), Latent()
        self.head = nn.Linear(WIDTH, CLASSES)

    def read(self, series):
        x = self.embed(series) + self.positions
        return x, self.latents.expand(len(x), -1, -1)


class EachRound(Perceiver):
    def forward(self, series):
        x, z = self.read(series)
        for _ in range(ROUNDS):
            k, v = self.cross.keys(x)  # guilty
            z = self.latent(self.cross(z, k, v))
        return self.head(z.mean(1))


class Once(Perceiver):
    def forward(self, series):
        x, z = self.read(series)
        k, v = self.cross.keys(x)
        for _ in range(ROUNDS):
            z = self.latent(self.cross(z, k, v))
        return self.head(z.mean(1))


def build(model):
    my_turn()

    def batch(size):
        series = torch.randn(size, TIME, FEATURES, device=device())
        return series, torch.randint(CLASSES, (size,), device=device())

    def loss(model, pair):
        with mixed():
            return F.cross_entropy(model(pair[0]), pair[1])

    return steplab.UserModel(
        model(), lambda size: in_turn(lambda: batch(size), 4), loss, unit="series"
    )


def faulty():
    return build(EachRound)


def clean():
    return build(Once)
