"""A transformer for time series of different lengths masks what is padding and what is future. Because
nn.MultiheadAttention used to want a mask for each head, the float mask is repeated for all heads,
and the copies stay in memory for the backward pass; attention broadcasts a mask of one head by itself.
A good finding names the attention mask copied for each head (repeat instead of broadcast) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the attention mask is copied for each head",
    "FIX": "leave the head dimension at 1 and let attention broadcast it",
}
BATCH, POINTS, CHANNELS = by_device(16, 3), by_device(1024, 384), 8
WIDTH, HEADS, LAYERS = by_device(512, 64), by_device(16, 8), 2


class Layer(Block):
    def __init__(self):
        super().__init__(WIDTH, HEADS)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Forecaster(nn.Module):
    def __init__(self, for_heads):
        super().__init__()
        self.for_heads = for_heads
        self.start, self.places = nn.Linear(CHANNELS, WIDTH), nn.Embedding(POINTS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.end = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHANNELS)
        dtype = torch.bfloat16 if device() == "cuda" else torch.float32
        future = torch.full((POINTS, POINTS), -torch.inf, dtype=dtype).triu(1)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x, lengths):
        x = self.start(x) + self.places.weight
        padded = torch.arange(POINTS, device=x.device) >= lengths[:, None]
        mask = self.future.masked_fill(padded[:, None, None], -torch.inf)
        mask = self.for_heads(mask)
        for layer in self.layers:
            x = layer(x, mask)
        return self.end(self.norm(x))


def repeated(mask):
    return mask.repeat(1, HEADS, 1, 1)  # guilty


def broadcast(mask):
    return mask


def build(for_heads):
    model = Forecaster(for_heads).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, POINTS + 1, CHANNELS, device=device()),
            torch.randint(POINTS // 2, POINTS + 1, (BATCH,), device=device()),
        )
    )

    def step():
        series, lengths = next(data)
        known = torch.arange(POINTS, device=device()) < lengths[:, None]
        with mixed():
            guess = model(series[:, :-1], lengths)
        apart = F.smooth_l1_loss(guess.float(), series[:, 1:], reduction="none").mean(-1)
        loss = (apart * known).sum() / known.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(repeated)


def clean():
    return build(broadcast)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
