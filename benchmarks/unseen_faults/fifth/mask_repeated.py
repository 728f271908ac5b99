"""Which tokens are padding is one number per token. The encoder repeats it for every head and every
query by repeat, and so holds a copy as large as all attention scores.
A good finding names the repeated mask, hundreds of times larger than what it says, and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 4,
    "CAUSE": "the padding mask is copied for every head and every query instead of being broadcast",
    "FIX": "expand, or a mask of shape (batch, 1, 1, time)",
}
TIME, WIDTH, LAYERS, HEADS = by_device(1024, 384), by_device(768, 64), by_device(8, 2), 8
CLASSES = 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self, spread):
        super().__init__()
        self.embed, self.head = nn.Linear(32, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers, self.spread = nn.ModuleList(Layer() for _ in range(LAYERS)), spread

    def forward(self, x, padding):
        mask = self.spread(padding[:, None, None])
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x[:, 0])


def repeated(mask):
    return mask.repeat(1, HEADS, TIME, 1)  # guilty


def broadcast(mask):
    return mask.expand(-1, HEADS, TIME, -1)


def build(spread):
    my_turn()

    def batch(size):
        lengths = torch.randint(TIME * 7 // 8, TIME + 1, (size, 1))
        padding = torch.zeros(size, TIME).masked_fill(torch.arange(TIME) >= lengths, -torch.inf)
        return (
            torch.randn(size, TIME, 32, device=device()),
            padding.to(device()),
            torch.randint(CLASSES, (size,), device=device()),
        )

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(*batch[:2]), batch[2])

    return steplab.UserModel(Encoder(spread), lambda size: in_turn(lambda: batch(size)), loss, TIME)


def faulty():
    return build(repeated)


def clean():
    return build(broadcast)
