"""The layers of an encoder share one table of relative position biases, but each layer looks up the
same bias of all pairs of positions again, and its backward pass adds up the table's gradient again.
A good finding names the lookups of the bias in every layer, and the line that does them.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 1,
    "CAUSE": "the same bias of all pairs of positions is looked up in a shared table by every layer",
    "FIX": "look it up once and hand it to all layers",
}
TIME, WIDTH, LAYERS, HEADS = by_device(512, 256), by_device(768, 64), by_device(12, 4), 4
REACH, CLASSES = 64, 16


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2 * REACH + 1, HEADS)
        where = torch.arange(TIME)
        apart = (where[None] - where[:, None]).clamp(-REACH, REACH) + REACH
        self.register_buffer("apart", apart, persistent=False)

    def forward(self):
        return self.table(self.apart).permute(2, 0, 1)[None]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, bias):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(32, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.bias, self.layers = Bias(), nn.ModuleList(Layer() for _ in range(LAYERS))


class PerLayer(Encoder):
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.bias())  # guilty
        return self.head(x.mean(1))


class Shared(Encoder):
    def forward(self, x):
        x, bias = self.embed(x), self.bias()
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x.mean(1))


def build(encoder):
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

    return steplab.UserModel(encoder(), batches, loss, TIME)


def faulty():
    return build(PerLayer)


def clean():
    return build(Shared)
