"""A language model with tied embeddings multiplies its last states by the transposed table of tokens. The
author has read that products want contiguous operands and wrote .t().contiguous(): the largest weight
of the model is copied, transposed, in every forward pass, and its gradient comes back transposed and
is turned around again on its way to the table. The product reads a transposed view just as well.
A good finding names the copy of the transposed table, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import Block, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the tied table is copied to a contiguous transposed one in every forward pass",
    "FIX": "F.linear(x, self.tokens.weight), which takes the table as it lies",
    "BATCH": 1,
    "CPU_BATCH": 1,
}
CONTEXT, VOCAB = by_device(256, 32), by_device(131_072, 16_384)
WIDTH, HEADS, LAYERS = by_device(1024, 128), by_device(16, 2), 2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def hidden(self, ids):
        return self.norm(self.blocks(self.tokens(ids) + self.places.weight))


class HeadOnACopy(Tied):
    def forward(self, ids):
        head = self.tokens.weight.t().contiguous()  # guilty
        return self.hidden(ids) @ head


class HeadOnTheTable(Tied):
    def forward(self, ids):
        return F.linear(self.hidden(ids), self.tokens.weight)


def text(size):
    def batch():
        ids = torch.randint(VOCAB, (size, CONTEXT + 1), device=device())
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return in_turn(batch)


def loss(model, batch):
    ids, following = batch
    with mixed():
        return F.cross_entropy(model(ids).flatten(0, 1), following.flatten())


def sgd(model, **how):
    return torch.optim.SGD(model.parameters(), lr=0.1, **{"fused": True, **how})


def faulty():
    return steplab.UserModel(HeadOnACopy(), text, loss, optimizer=sgd)


def clean():
    return steplab.UserModel(HeadOnTheTable(), text, loss, optimizer=sgd)
