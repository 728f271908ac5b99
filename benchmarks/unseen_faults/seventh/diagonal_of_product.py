"""A two-tower model scores each query with its own document. All queries are multiplied with all
documents, and only the diagonal of the result is used.
A good finding names the product of which nearly nothing is used, and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16_384,
    "CPU_BATCH": 1536,
    "CAUSE": "the product of all queries with all documents is computed, and only its diagonal is used",
    "FIX": "(queries * documents).sum(-1)",
}
FEATURES, WIDTH = by_device(128, 64), by_device(512, 160)


def tower():
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
    )


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.document = tower(), tower()


class Diagonal(Towers):
    def forward(self, queries, documents):
        q, d = self.query(queries), self.document(documents)
        return torch.diag(q @ d.T)  # guilty


class Pairs(Towers):
    def forward(self, queries, documents):
        q, d = self.query(queries), self.document(documents)
        return (q * d).sum(-1)


def build(model):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, FEATURES, device=device()),
                torch.randn(size, FEATURES, device=device()),
                torch.rand(size, device=device()).round(),
            )
        )

    def loss(model, batch):
        queries, documents, clicked = batch
        with mixed():
            scores = model(queries, documents)
        return F.binary_cross_entropy_with_logits(scores.float(), clicked)

    return steplab.UserModel(model(), batches, loss, unit="pairs")


def faulty():
    return build(Diagonal)


def clean():
    return build(Pairs)
