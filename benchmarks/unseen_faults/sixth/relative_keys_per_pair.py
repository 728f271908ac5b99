"""Attention with relative positions gathers a key vector for every pair of positions, time x time x
width, instead of multiplying the queries with the few distinct vectors and shifting the result.
A good finding names the gathered tensor of all pairs, and the line that gathers it.
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
    "CAUSE": "a relative key is gathered for every pair of positions: time x time x width, in every layer",
    "FIX": "multiply the queries with the 2 time - 1 keys and shift the rows of the product",
}
TIME, WIDTH, LAYERS, HEADS = by_device(512, 192), by_device(512, 128), by_device(8, 2), 4
CLASSES = 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.keys = nn.Embedding(2 * TIME - 1, WIDTH // HEADS)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        bias = self.relative(q) * q.shape[-1] ** -0.5
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gathered(Layer):
    def __init__(self):
        super().__init__()
        where = torch.arange(TIME)
        apart = where[None] - where[:, None] + TIME - 1
        self.register_buffer("apart", apart, persistent=False)

    def relative(self, q):
        keys = self.keys(self.apart)  # guilty
        return torch.einsum("bhid,ijd->bhij", q, keys)


class Shifted(Layer):
    def relative(self, q):
        t = q.shape[2]
        all_keys = F.pad(q @ self.keys.weight.T, (0, 1)).flatten(2)
        return all_keys[:, :, t - 1 : -1].unflatten(2, (t, 2 * t - 1))[..., :t]


class Encoder(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.head = nn.Linear(32, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.Sequential(*(layer() for _ in range(LAYERS)))

    def forward(self, x):
        return self.head(self.layers(self.embed(x)).mean(1))


def build(layer):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, TIME, 32, device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(batch[0]), batch[1])

    return steplab.UserModel(Encoder(layer), batches, loss, TIME)


def faulty():
    return build(Gathered)


def clean():
    return build(Shifted)
