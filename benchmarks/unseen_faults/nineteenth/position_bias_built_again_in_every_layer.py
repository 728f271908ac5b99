"""An encoder in the style of T5 adds a learned bias of the relative position to its attention scores. One
table of biases is shared by all layers, but each layer sorts all pairs of positions into the
logarithmic buckets and looks the biases up again, and the backward pass adds up the same table's
gradient pair by pair as often. Built once in a forward pass, the bias serves all layers.
A good finding names the buckets or the lookup of the bias in every layer, and the line.
"""

import math

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the shared bias of relative positions is computed again in every layer",
    "FIX": "compute the bias once in the encoder's forward pass and hand it to the layers",
    "BATCH": 16,
    "CPU_BATCH": 1,
}
CONTEXT, VOCAB, BUCKETS, FARTHEST = by_device(512, 192), by_device(16_384, 256), 32, 128
WIDTH, HEADS, LAYERS = by_device(512, 96), by_device(8, 4), by_device(8, 5)


class RelativeBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, HEADS)

    def forward(self, time, where):
        place = torch.arange(time, device=where)
        apart = place[None, :] - place[:, None]
        half, exact = BUCKETS // 2, BUCKETS // 4
        side, apart = (apart > 0).long() * half, apart.abs()
        far = torch.log(apart.clamp(min=1).float() / exact) / math.log(FARTHEST / exact)
        far = (exact + (far * (half - exact)).long()).clamp(max=half - 1)
        bucket = side + torch.where(apart < exact, apart, far)
        return self.table(bucket).permute(2, 0, 1)[None]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, bias):
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.bias = nn.Embedding(VOCAB, WIDTH), RelativeBias()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)


class BiasPerLayer(Encoder):
    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.bias(ids.shape[1], ids.device))  # guilty
        return self.head(self.norm(x))


class BiasPerPass(Encoder):
    def forward(self, ids):
        x, bias = self.tokens(ids), self.bias(ids.shape[1], ids.device)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.norm(x))


def masked_text(size):
    def batch():
        ids = torch.randint(1, VOCAB, (size, CONTEXT), device=device())
        hidden = torch.rand(size, CONTEXT, device=device()) < 0.15
        return ids.masked_fill(hidden, 0), ids.masked_fill(~hidden, -100)

    return in_turn(batch)


def loss(model, batch):
    ids, labels = batch
    with mixed():
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def faulty():
    return steplab.UserModel(BiasPerLayer(), masked_text, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(BiasPerPass(), masked_text, loss, optimizer=adamw)
