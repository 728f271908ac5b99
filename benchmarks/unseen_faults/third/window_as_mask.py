"""Attention to the last 64 positions is computed as attention to all positions with a mask that
forbids the others, so nearly all scores are computed to be discarded.
A good finding names attention over the full square with a mask that leaves a narrow band, and the
line of the call.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 8,
    "CPU_BATCH": 1,
    "CAUSE": "a sliding window of 64 is a mask over the full square of scores, of which 94 % and more are computed and discarded",
    "FIX": "compute attention in blocks of the window's size, each with its predecessor",
}
TIME, WINDOW = by_device(8192, 2048), 64
WIDTH, HEADS, LAYERS = by_device(512, 64), by_device(8, 2), 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Blocked(Layer):
    def __init__(self):
        super().__init__()
        inside = torch.arange(WINDOW)[:, None] + WINDOW - torch.arange(2 * WINDOW)[None, :]
        blocks = ((inside >= 0) & (inside < WINDOW)).repeat(TIME // WINDOW, 1, 1)
        blocks[0, :, :WINDOW] = False
        self.register_buffer("blocks", blocks, persistent=False)

    def attend(self, q, k, v):
        q = q.unflatten(2, (-1, WINDOW))
        k, v = (
            F.pad(a, (0, 0, WINDOW, 0)).unfold(2, 2 * WINDOW, WINDOW).transpose(-1, -2)
            for a in (k, v)
        )
        b, h = q.shape[:2]
        y = F.scaled_dot_product_attention(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), attn_mask=self.blocks
        )
        return y.unflatten(0, (b, h)).flatten(2, 3)


class Masked(Layer):
    def __init__(self):
        super().__init__()
        place = torch.arange(TIME)
        behind = place[:, None] - place[None, :]
        self.register_buffer("band", (behind >= 0) & (behind < WINDOW), persistent=False)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.band)  # guilty


class Series(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.head = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.Sequential(*(layer() for _ in range(LAYERS)))

    def forward(self, x):
        return self.head(self.layers(self.embed(x.unsqueeze(-1)))).squeeze(-1)


def build(layer):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME + 1, device=device()))

    def loss(model, x):
        with mixed():
            return F.huber_loss(model(x[:, :-1]), x[:, 1:])

    return steplab.UserModel(Series(layer), batches, loss, tokens_per_sequence=TIME)


def faulty():
    return build(Masked)


def clean():
    return build(Blocked)
