"""The logits (batch, time, vocabulary) are transposed to (batch, vocabulary, time), as the page of
CrossEntropyLoss shows it for more dimensions. The softmax then runs over a dimension that is not the
last, with a copy of all logits, instead of over flat rows.
A good finding names the transposed layout of the logits (the copy, or the slow softmax over dim 1),
and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 16,
    "CAUSE": "logits are transposed to (batch, vocabulary, time) for the loss, whose softmax then runs along strided memory",
    "FIX": "flatten batch and time and leave the vocabulary last",
}
WIDTH, VOCAB, CONTEXT = by_device(1024, 64), by_device(32768, 8192), by_device(256, 32)


class Language(nn.Module):
    """A GRU language model."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(self.norm(self.rnn(self.tokens(ids))[0]))


def classes_second(logits, targets):
    return F.cross_entropy(logits.transpose(1, 2), targets)  # guilty


def flat_rows(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(loss_of):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randint(VOCAB, (size, CONTEXT + 1), device=device()))

    def loss(model, ids):
        with mixed():
            return loss_of(model(ids[:, :-1]), ids[:, 1:])

    return steplab.UserModel(Language(), batches, loss, unit="sequences")


def faulty():
    return build(classes_second)


def clean():
    return build(flat_rows)
