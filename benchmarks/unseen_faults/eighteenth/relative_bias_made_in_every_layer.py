"""An encoder with learned biases for relative distances, which all its layers share, is tuned to classify
texts. Each layer asks the shared table anew: distances, logarithmic buckets and the lookup of a bias for
every pair of positions, and in the backward pass a scatter of all pairs into the table. The bias is the
same in every layer, so it can be made once per step and handed on.
A good finding names the bias (or its buckets) being made in every layer, and a line of it.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the shared relative position bias is computed again in every layer",
    "FIX": "compute the bias once per forward pass and hand it to all layers",
}
SIZE, CONTEXT, VOCAB, CLASSES = by_device(16, 1), by_device(512, 208), by_device(16_384, 512), 4
WIDTH, HEADS, LAYERS = by_device(512, 96), by_device(8, 6), by_device(8, 4)
BUCKETS, FARTHEST = 32, 128


class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, HEADS)

    def forward(self, count):
        places = torch.arange(count, device=self.table.weight.device)
        apart = places[None] - places[:, None]
        half, exact = BUCKETS // 2, BUCKETS // 4
        far = apart.abs()
        scale = math.log(FARTHEST / exact)
        rough = exact + (far.clamp(min=1).float() / exact).log().div(scale).mul(half - exact).long()
        bucket = torch.where(far < exact, far, rough.clamp(max=half - 1)) + (apart > 0) * half
        return self.table(bucket).permute(2, 0, 1)[None]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, bias):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.distances = nn.Embedding(VOCAB, WIDTH), Distances()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)


class AskingReader(Reader):
    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.distances(ids.shape[1]))  # guilty
        return self.head(x.mean(1))


class HandingReader(Reader):
    def forward(self, ids):
        x, bias = self.tokens(ids), self.distances(ids.shape[1])
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x.mean(1))


def texts():
    ids = torch.randint(VOCAB, (SIZE, CONTEXT), device=device())
    return ids, torch.randint(CLASSES, (SIZE,), device=device())


def training(kind):
    torch.manual_seed(0)
    model = kind().to(device())
    optimizer, batches = adamw(model), in_turn(texts)

    def step():
        ids, labels = next(batches)
        with mixed():
            loss = F.cross_entropy(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return training(AskingReader)


def clean():
    return training(HandingReader)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
