"""A decoder with bf16 weights rotates its queries and keys in fp32, as it should, but does not cast
them back. The attention complained about mixed dtypes, so the values were cast to fp32 as well: now
the whole attention, forward and backward, runs in fp32, without the flash kernel. Losses agree up to
the rounding of bf16.
A good finding names the attention in fp32 (or the cast of the values) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "rotated queries and keys stay in fp32 and the values are cast up to match, so attention runs in fp32 without the flash kernel",
    "FIX": "cast the rotated queries and keys back to the dtype of the values",
}
BATCH, TIME, WIDTH = by_device(8, 2), by_device(2048, 192), by_device(1024, 256)
LAYERS, HEADS, VOCAB = by_device(6, 2), by_device(16, 2), by_device(8192, 256)


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cos, sin):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(y.transpose(1, 2).reshape(b, t, w))


class InFloat(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True).to(
            v.dtype
        )  # guilty


class InHalf(Attention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm1, self.norm2, self.attention = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            attention(),
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(attention) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, cos, sin):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def build(attention):
    model = Model(attention).to(device(), torch.bfloat16)
    optimizer = adamw(model)
    half = WIDTH // HEADS // 2
    speed = 10000 ** (-torch.arange(half, device=device()) / half)
    angle = torch.arange(TIME, device=device())[:, None] * speed
    cos, sin = angle.cos(), angle.sin()
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, TIME + 1), device=device()))

    def step():
        ids = next(data)
        logits = model(ids[:, :-1], cos, sin)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(InFloat)


def clean():
    return build(InHalf)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
