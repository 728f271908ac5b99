"""A speech encoder (transformer over mel frames) learns to name the speaker. Its attention is
spelled out: a product, a division, masked_fill, softmax and a second product, in every layer.
A good finding names the attention that is computed in single operators over frames x frames
scores, and the lines of its forward that do so.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "attention is spelled out in products, masked_fill and softmax over all frame pairs",
    "FIX": "call F.scaled_dot_product_attention with the padding mask",
}
BATCH, FRAMES, MELS, SPEAKERS = by_device(32, 2), by_device(1024, 320), 80, 100
WIDTH, HEADS, LAYERS = by_device(512, 64), by_device(8, 4), by_device(6, 2)


class SpelledOut(nn.Module):
    def forward(self, q, k, v, keep):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~keep, float("-inf"))
        return torch.softmax(scores, -1) @ v  # guilty


class Fused(nn.Module):
    def forward(self, q, k, v, keep):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, keep):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = self.attention(q, k, v, keep)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.frames = nn.Linear(MELS, WIDTH)
        self.layers = nn.ModuleList(Layer(attention()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, SPEAKERS)

    def forward(self, mels, keep):
        x = self.frames(mels)
        for layer in self.layers:
            x = layer(x, keep[:, None, None, :])
        weight = keep[..., None].to(x.dtype)
        return self.head((x * weight).sum(1) / weight.sum(1))


def batch():
    mels = torch.randn(BATCH, FRAMES, MELS, device=device())
    lengths = torch.randint(FRAMES * 3 // 4, FRAMES + 1, (BATCH,), device=device())
    keep = torch.arange(FRAMES, device=device()) < lengths[:, None]
    return mels, keep, torch.randint(SPEAKERS, (BATCH,), device=device())


def training(attention):
    model = Encoder(attention).to(device())
    optimizer, data = adamw(model), in_turn(batch)

    def step():
        mels, keep, speakers = next(data)
        with mixed():
            loss = F.cross_entropy(model(mels, keep).float(), speakers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(SpelledOut)


def clean():
    return training(Fused)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
