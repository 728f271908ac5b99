"""The targets of a language model are turned into one-hot rows as wide as the vocabulary before the
cross-entropy, first as integers of 64 bits and then as floats.
A good finding names the one-hot targets, several times the size of the logits, and their line.
"""

import steplab
import torch.nn.functional as F

from common import Decoder, by_device, mixed, my_turn, token_batches

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 4,
    "CAUSE": "targets are one-hot rows of the whole vocabulary instead of class numbers",
    "FIX": "give cross_entropy the class numbers",
}
CONTEXT, WIDTH, LAYERS, VOCAB = (
    by_device(512, 192),
    by_device(512, 32),
    by_device(6, 1),
    by_device(32_768, 6000),
)


def faulty_loss(model, ids):
    with mixed():
        logits = model(ids[:, :-1]).flatten(0, 1)
        targets = F.one_hot(ids[:, 1:].flatten(), VOCAB).float()  # guilty
        return F.cross_entropy(logits, targets)


def clean_loss(model, ids):
    with mixed():
        logits = model(ids[:, :-1]).flatten(0, 1)
        targets = ids[:, 1:].flatten()
        return F.cross_entropy(logits, targets)


def build(loss):
    my_turn()
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
    return steplab.UserModel(model, token_batches(VOCAB, CONTEXT), loss, CONTEXT)


def faulty():
    return build(faulty_loss)


def clean():
    return build(clean_loss)
