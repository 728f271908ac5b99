"""A diffusion model of small pictures learns with classifier-free guidance: for one picture in ten the class
is dropped. The wrapper was copied from the sampler, which needs both predictions: it runs the network
with the class and without, and then picks one of the two for each picture. In training the class
can be replaced before a single pass.
A good finding names the second pass of the network whose result is mostly thrown away, and one of the lines.
"""

import math

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the denoiser runs with and without the class and one result per picture is dropped",
    "FIX": "replace the dropped classes by the empty class first and run the denoiser once",
    "BATCH": 64,
    "CPU_BATCH": 15,
}
SIDE, CLASSES, TIMES = by_device(64, 16), 10, 1000
WIDTH, BLOCKS = by_device(256, 32), by_device(8, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, WIDTH), nn.GroupNorm(8, WIDTH)
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.shift = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, code):
        y = self.conv1(F.silu(self.norm1(x))) + self.shift(code)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(y)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 3, 3, padding=1)
        self.classes = nn.Embedding(CLASSES + 1, WIDTH)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.register_buffer("pitch", torch.exp(-math.log(1e4) * torch.linspace(0, 1, WIDTH // 2)))

    def forward(self, x, t, kind):
        angle = t[:, None] * self.pitch
        code = self.time(torch.cat([angle.sin(), angle.cos()], 1)) + self.classes(kind)
        x = self.into(x)
        for block in self.blocks:
            x = block(x, code)
        return self.out(x)


class Guided(nn.Module):
    def __init__(self, both):
        super().__init__()
        self.both, self.denoiser = both, Denoiser()

    def forward(self, x, t, kind, drop):
        empty = torch.full_like(kind, CLASSES)
        if self.both:
            told = self.denoiser(x, t, kind)
            untold = self.denoiser(x, t, empty)  # guilty
            return torch.where(drop[:, None, None, None], untold, told)
        return self.denoiser(x, t, torch.where(drop, empty, kind))


def pictures(size):
    def batch():
        at = device()
        clean_picture, noise = torch.randn(2, size, 3, SIDE, SIDE, device=at)
        t = torch.randint(TIMES, (size,), device=at)
        kind = torch.randint(CLASSES, (size,), device=at)
        return clean_picture, noise, t, kind, torch.rand(size, device=at) < 0.1

    return in_turn(batch)


def loss(model, batch):
    picture, noise, t, kind, drop = batch
    angle = (t / TIMES * math.pi / 2)[:, None, None, None]
    with mixed():
        guess = model(picture * angle.cos() + noise * angle.sin(), t, kind, drop)
        return F.mse_loss(guess, noise)


def faulty():
    return steplab.UserModel(Guided(both=True), pictures, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(Guided(both=False), pictures, loss, optimizer=adamw)
