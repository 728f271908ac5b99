"""A masked autoencoder hides three quarters of the patches from the encoder with an attention mask,
runs all of them through its blocks, and drops the hidden ones at the end. The point of such an
autoencoder is to drop them before.
A good finding names the rows that are computed and thrown away (or the mask) and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 128,
    "CPU_BATCH": 16,
    "CAUSE": "hidden patches go through the whole encoder behind an attention mask and are dropped after it; three quarters of the rows are computed for nothing",
    "FIX": "gather the visible patches before the encoder",
}
PATCHES, PIXELS, WIDTH, NARROW = (
    by_device(256, 64),
    by_device(768, 48),
    by_device(768, 128),
    by_device(384, 64),
)
VISIBLE, LAYERS = PATCHES // 4, by_device(8, 2)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask=None):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def take(x, keep):
    return x.gather(1, keep.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = (
            nn.Linear(PIXELS, WIDTH),
            nn.Parameter(torch.zeros(1, PATCHES, WIDTH)),
        )
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.narrow, self.hidden = nn.Linear(WIDTH, NARROW), nn.Parameter(torch.zeros(NARROW))
        self.decoder, self.pixels = Block(NARROW), nn.Linear(NARROW, PIXELS)

    def forward(self, patches, keep):
        seen = self.narrow(self.encode(patches, keep))
        full = self.hidden.to(seen.dtype).expand(len(patches), PATCHES, NARROW)
        full = full.scatter(1, keep.unsqueeze(-1).expand_as(seen), seen)
        return self.pixels(self.decoder(full))


class Masked(Model):
    def encode(self, patches, keep):
        x = self.embed(patches) + self.place
        visible = torch.zeros(patches.shape[:2], dtype=torch.bool, device=x.device)
        visible = visible.scatter(1, keep, True)[:, None, None]
        for block in self.blocks:
            x = block(x, visible)  # guilty
        return take(x, keep)


class Dropped(Model):
    def encode(self, patches, keep):
        x = self.embed(take(patches, keep)) + take(self.place.expand(len(keep), -1, -1), keep)
        for block in self.blocks:
            x = block(x)
        return x


def build(kind):
    my_turn()

    def batch(size):
        keep = torch.rand(size, PATCHES, device=device()).argsort(1)[:, :VISIBLE].contiguous()
        return torch.randn(size, PATCHES, PIXELS, device=device()), keep

    def loss(model, pair):
        with mixed():
            return F.mse_loss(model(*pair).float(), pair[0])

    return steplab.UserModel(kind(), lambda size: in_turn(lambda: batch(size)), loss, unit="images")


def faulty():
    return build(Masked)


def clean():
    return build(Dropped)
