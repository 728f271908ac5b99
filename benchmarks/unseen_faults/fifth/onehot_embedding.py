"""Tokens enter the model as one-hot rows that are multiplied by a weight matrix: a matrix product
over the whole vocabulary to pick one row per token, forward and backward.
A good finding names the one-hot rows or their product with the matrix, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import Block, by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32,
    "CPU_BATCH": 8,
    "CAUSE": "tokens are looked up by a product of one-hot rows with the embedding matrix",
    "FIX": "F.embedding(ids, weight)",
}
TIME, WIDTH, LAYERS = by_device(512, 48), by_device(768, 128), by_device(4, 2)
VOCAB, CLASSES = by_device(32_768, 2000), 16


def by_product(ids, weight):
    return F.one_hot(ids, VOCAB).to(weight.dtype) @ weight  # guilty


def by_lookup(ids, weight):
    return F.embedding(ids, weight)


class Classifier(nn.Module):
    def __init__(self, embed):
        super().__init__()
        self.weight, self.embed = nn.Parameter(torch.randn(VOCAB, WIDTH)), embed
        self.blocks = nn.Sequential(*(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids, self.weight)).mean(1))


def build(embed):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randint(VOCAB, (size, TIME), device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(batch[0]), batch[1])

    return steplab.UserModel(Classifier(embed), batches, loss, TIME)


def faulty():
    return build(by_product)


def clean():
    return build(by_lookup)
