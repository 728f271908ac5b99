"""A video transformer attends within each frame, then along time at each place. The attention within
frames runs over all tokens of the clip, with a mask that forbids every other frame: seven eighths of
the scores are computed and thrown away, and a mask rules out the fastest kernel. Frames moved into
the batch dimension, as the attention along time does it, need no mask.
A good finding names the masked attention over the whole clip and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "attention within frames runs over all tokens of the clip behind a mask, and most of the scores are discarded",
    "FIX": "move the frames into the batch dimension: (batch x frames, patches, width), without a mask",
}
BATCH, FRAMES, PATCHES = by_device(8, 4), 8, by_device(256, 64)
WIDTH, LAYERS, HEADS, CLASSES = by_device(768, 64), by_device(6, 1), by_device(12, 1), 100
PIXELS = by_device(768, 48)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        """Attend along the second last dimension."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.space, self.time, self.norm = Attention(), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def rest(self, x):
        """Attend along time, then feed forward; x is (batch, frames, patches, width)."""
        t = x.transpose(1, 2)
        x = x + self.time(t.flatten(0, 1)).view(t.shape).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Masked(Block):
    def forward(self, x, mask):
        x = x + self.space(x.flatten(1, 2), mask).view(x.shape)  # guilty
        return self.rest(x)


class PerFrame(Block):
    def forward(self, x, mask):
        x = x + self.space(x.flatten(0, 1)).view(x.shape)
        return self.rest(x)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.patch, self.head = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.places = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        self.times = nn.Parameter(torch.randn(FRAMES, 1, WIDTH) * 0.02)
        self.blocks, self.norm = nn.ModuleList(block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        mask = None
        if block is Masked:
            frame = torch.arange(FRAMES).repeat_interleave(PATCHES)
            mask = frame[:, None] == frame
        self.register_buffer("mask", mask)

    def forward(self, clips):
        x = self.patch(clips) + (self.places + self.times)
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x).mean((1, 2)))


def build(block):
    model = Model(block).to(device())
    optimizer = adamw(model)

    def batch():
        clips = torch.randn(BATCH, FRAMES, PATCHES, PIXELS, device=device())
        return clips, torch.randint(CLASSES, (BATCH,), device=device())

    data = in_turn(batch, 4)

    def step():
        clips, labels = next(data)
        with mixed():
            loss = F.cross_entropy(model(clips), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Masked)


def clean():
    return build(PerFrame)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
