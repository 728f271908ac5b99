"""Every layer of this decoder mixes each token with the mean of all tokens up to it. The mean is a
product with a triangular matrix of time x time, as in a well-known lecture on attention, where a
cumulative sum would do.
A good finding names the product with the triangular matrix of constants, and the line.
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
    "CPU_BATCH": 2,
    "CAUSE": "running means are products with a triangular matrix of time x time instead of cumulative sums",
    "FIX": "torch.cumsum divided by the number of tokens so far",
}
WIDTH, LAYERS, VOCAB = by_device(512, 96), by_device(4, 2), by_device(8192, 512)
CONTEXT = by_device(4096, 768)


class Block(nn.Module):
    """Average attention: the running mean, a gate, and a feed-forward."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.gate, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        lower = torch.tril(torch.ones(CONTEXT, CONTEXT))
        self.register_buffer("mean", lower / lower.sum(1, keepdim=True), persistent=False)

    def average(self, x):
        return self.mean @ x  # guilty

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.proj(self.average(y) * torch.sigmoid(self.gate(y)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Cumulative(Block):
    def __init__(self):
        super().__init__()
        share = 1 / torch.arange(1, CONTEXT + 1).unsqueeze(1)
        self.register_buffer("mean", share, persistent=False)

    def average(self, x):
        return torch.cumsum(x, 1) * self.mean


class Language(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids))))


def build(block):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randint(VOCAB, (size, CONTEXT + 1), device=device()))

    def loss(model, ids):
        with mixed():
            return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return steplab.UserModel(Language(block), batches, loss, unit="sequences")


def faulty():
    return build(Block)


def clean():
    return build(Cumulative)
