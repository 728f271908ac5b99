"""Every layer makes the cosines and sines of its rotary positions in its forward, for the longest
context that the model allows, and then cuts out the few hundred rows that the batch has.
A good finding names the table of positions that is made anew in every layer, and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 4,
    "CPU_BATCH": 2,
    "CAUSE": "every layer makes the rotary table of the longest context in every forward",
    "FIX": "make the table once, as a buffer, and share it between the layers",
}
VOCAB, TIME, LONGEST = 512, by_device(512, 64), by_device(131_072, 32_768)
WIDTH, LAYERS, HEAD = by_device(768, 192), by_device(12, 4), 64


def table(length, where):
    rates = 10_000 ** (-torch.arange(0, HEAD, 2, device=where) / HEAD)
    angles = torch.outer(torch.arange(length, device=where), rates)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def mix(self, x, cos, sin):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MakesTable(Layer):
    def forward(self, x):
        cos, sin = table(LONGEST, x.device)  # guilty
        return self.mix(x, cos[: x.shape[1]], sin[: x.shape[1]])


class WithTable(Layer):
    def __init__(self):
        super().__init__()
        cos, sin = table(TIME, "cpu")
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x):
        return self.mix(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(*(layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.tokens(ids))))


def build(layer):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randint(VOCAB, (size, TIME + 1), device=device()))

    def loss(model, ids):
        with mixed():
            logits = model(ids[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    return steplab.UserModel(Model(layer), batches, loss, unit="samples")


def faulty():
    return build(MakesTable)


def clean():
    return build(WithTable)
