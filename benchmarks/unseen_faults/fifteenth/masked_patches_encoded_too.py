"""A masked autoencoder learns from images of which it hides three patches in four. Its encoder gets
all patches and a mask for the attention, so that nothing looks at a hidden one; after the last block
the hidden ones are dropped, and the decoder puts mask tokens in their places. The states of the
hidden patches are computed in every block for nobody: they can be dropped before the encoder.
A good finding names the patches that go through the encoder and are thrown away, or the mask of the
attention that hides most of the keys, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the hidden patches go through the whole encoder behind a mask and are dropped at its end",
    "FIX": "gather the visible patches before the first block and leave the mask out",
    "BATCH": 64,
    "CPU_BATCH": 10,
}
PATCHES, PIXELS, SEEN = by_device(196, 64), by_device(768, 192), by_device(49, 16)
WIDTH, LAYERS = by_device(768, 64), by_device(12, 6)
NARROW, LATE = by_device(512, 64), by_device(8, 3)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask=None):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def take(x, rows):
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


class MaskedAutoencoder(nn.Module):
    def __init__(self, early):
        super().__init__()
        self.early = early
        self.patch = nn.Linear(PIXELS, WIDTH)
        self.place = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        self.encoder = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.norm, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NARROW)
        self.blank = nn.Parameter(torch.zeros(NARROW))
        self.late_place = nn.Parameter(torch.randn(PATCHES, NARROW) * 0.02)
        self.decoder = nn.ModuleList(Block(NARROW) for _ in range(LATE))
        self.head = nn.Sequential(nn.LayerNorm(NARROW), nn.Linear(NARROW, PIXELS))

    def encode(self, x, seen):
        if self.early:
            x = take(x, seen)
            for block in self.encoder:
                x = block(x)
            return self.norm(x)
        keys = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device).scatter(1, seen, True)
        for block in self.encoder:
            x = block(x, mask=keys[:, None, None])  # guilty
        return self.norm(take(x, seen))

    def forward(self, pixels, seen):
        x = self.narrow(self.encode(self.patch(pixels) + self.place, seen))
        rows = seen[..., None].expand(-1, -1, NARROW)
        x = self.blank.to(x.dtype).expand(len(x), PATCHES, -1).scatter(1, rows, x)
        x = x + self.late_place
        for block in self.decoder:
            x = block(x)
        return self.head(x)


def loss_of(model, batch):
    pixels, seen, hidden = batch
    with mixed():
        guess = model(pixels, seen)
    return F.mse_loss(take(guess.float(), hidden), take(pixels, hidden))


def batches(size):
    def make():
        order = torch.rand(size, PATCHES, device=device()).argsort(1)
        pixels = torch.randn(size, PATCHES, PIXELS, device=device())
        return pixels, order[:, :SEEN].contiguous(), order[:, SEEN:].contiguous()

    return in_turn(make)


def build(early):
    import steplab

    return steplab.UserModel(MaskedAutoencoder(early), batches, loss_of, optimizer=adamw)


def faulty():
    return build(early=False)


def clean():
    return build(early=True)
