"""The denoiser of a diffusion model spreads the embedding of the time over all pixels and then
sends this map, which is the same everywhere, through a 1x1 convolution in every block.
A good finding names the convolution of a constant map, and the line that calls it.
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
    "CPU_BATCH": 4,
    "CAUSE": "the embedding of the time is expanded to all pixels before its projection, which is the same for each",
    "FIX": "project the vector and let the sum broadcast it",
}
SIDE, WIDTH, EMBEDDING = by_device(64, 32), by_device(128, 24), by_device(512, 192)


class Block(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, a), nn.GroupNorm(8, b)
        self.conv1 = nn.Conv2d(a, b, 3, padding=1)
        self.conv2 = nn.Conv2d(b, b, 3, padding=1)
        self.time = nn.Conv2d(EMBEDDING, b, 1)
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.shift(t, h)
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class OnAllPixels(Block):
    def shift(self, t, h):
        everywhere = t[:, :, None, None].expand(-1, -1, *h.shape[2:])
        return self.time(everywhere)  # guilty


class OnVector(Block):
    def shift(self, t, h):
        return self.time(t[:, :, None, None])


class Denoiser(nn.Module):
    def __init__(self, block):
        super().__init__()
        w = WIDTH
        self.time = nn.Sequential(nn.Linear(1, EMBEDDING), nn.SiLU())
        self.first, self.last = nn.Conv2d(3, w, 3, padding=1), nn.Conv2d(w, 3, 3, padding=1)
        self.down, self.middle, self.up = block(w, w), block(w, 2 * w), block(3 * w, w)

    def forward(self, x, t):
        t = self.time(t)
        a = self.down(self.first(x), t)
        b = self.middle(F.avg_pool2d(a, 2), t)
        return self.last(self.up(torch.cat([a, F.interpolate(b, scale_factor=2.0)], 1), t))


def build(block):
    my_turn()

    def batches(size):
        def make():
            image, noise = (
                torch.rand(size, 3, SIDE, SIDE, device=device()).contiguous(
                    memory_format=torch.channels_last
                )
                for _ in range(2)
            )
            return image, noise, torch.rand(size, 1, device=device())

        return in_turn(make)

    def loss(model, batch):
        image, noise, t = batch
        share = t[:, :, None, None]
        mixture = torch.sqrt(1 - share) * image + torch.sqrt(share) * noise
        with mixed():
            return F.mse_loss(model(mixture, t), noise)

    model = Denoiser(block).to(device(), memory_format=torch.channels_last)
    return steplab.UserModel(model, batches, loss, unit="images")


def faulty():
    return build(OnAllPixels)


def clean():
    return build(OnVector)
