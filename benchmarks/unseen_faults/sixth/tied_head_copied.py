"""The head of a language model is the transposed embedding. A contiguous() behind the transposition
copies the whole table in every step, and its gradient is copied back the other way.
A good finding names the copies of the table, and the line of contiguous().
"""

import steplab
import torch.nn.functional as F
from torch import nn

from common import Block, by_device, mixed, my_turn, token_batches

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 1,
    "CPU_BATCH": 1,
    "CAUSE": "contiguous() copies the transposed embedding of the whole vocabulary in every step",
    "FIX": "F.linear with the embedding as it is",
}
TIME, WIDTH, LAYERS = by_device(256, 32), by_device(1024, 128), by_device(2, 1)
VOCAB = by_device(128_000, 16_000)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)))

    def forward(self, ids):
        return self.head(self.norm(self.blocks(0.02 * self.tokens(ids))))


class Copied(Model):
    def head(self, x):
        return 0.05 * x @ self.tokens.weight.t().contiguous()  # guilty


class Direct(Model):
    def head(self, x):
        return F.linear(0.05 * x, self.tokens.weight)


def build(model):
    my_turn()

    def loss(model, ids):
        with mixed():
            return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return steplab.UserModel(model(), token_batches(VOCAB, TIME), loss, TIME)


def faulty():
    return build(Copied)


def clean():
    return build(Direct)
