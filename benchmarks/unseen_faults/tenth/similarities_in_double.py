"""A sentence encoder is trained with in-batch and queued negatives; the scaled similarities are
made double before the softmax "to be stable", so the largest tensors of the step are float64.
A good finding names the float64 operators of the loss, and the line of the cast.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 4096,
    "CPU_BATCH": 384,
    "CAUSE": "the similarities of all pairs are cast to double, so the loss runs in float64",
    "FIX": "leave them in fp32: log_softmax subtracts the maximum anyway",
}
VOCAB, WORDS, WIDTH = by_device(30_000, 2000), 24, by_device(1024, 128)
QUEUE = by_device(65_536, 4096)


class Encoder(nn.Module):
    """Mean of word vectors, two layers, unit length; beside it a fixed bank of negatives."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(VOCAB, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.register_buffer("bank", F.normalize(torch.randn(QUEUE, WIDTH), dim=-1))

    def forward(self, ids):
        return F.normalize(self.layers(self.words(ids)), dim=-1)


def similarities(model, question, answer):
    with mixed():
        q, a = model(question), model(answer)
        return torch.cat([q @ a.T, q @ model.bank.T], dim=1)


def double_loss(model, batch):
    scores = similarities(model, *batch)
    scores = scores.double() / 0.05  # guilty
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device)).float()


def single_loss(model, batch):
    scores = similarities(model, *batch)
    scores = scores.float() / 0.05
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def build(loss):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randint(VOCAB, (size, WORDS), device=device()),
                torch.randint(VOCAB, (size, WORDS), device=device()),
            )
        )

    return steplab.UserModel(Encoder(), batches, loss, unit="pairs")


def faulty():
    return build(double_loss)


def clean():
    return build(single_loss)
