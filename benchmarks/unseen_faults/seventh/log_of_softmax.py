"""A language model's loss is spelled out: softmax of the logits of the whole vocabulary, a small
number added, the logarithm, and then the entry of the target, each with its own backward pass.
A good finding names the elementwise passes over the logits, or that cross_entropy does the same,
and the line.
"""

import steplab
import torch
import torch.nn.functional as F

from common import Decoder, by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 8,
    "CPU_BATCH": 2,
    "CAUSE": "the loss is the logarithm of a softmax over the vocabulary, with three more passes over the logits each way",
    "FIX": "F.cross_entropy(logits, targets)",
}
TIME, WIDTH, LAYERS = by_device(512, 64), by_device(512, 64), by_device(4, 1)
VOCAB = by_device(50_304, 12_000)


def faulty_loss(model, ids):
    with mixed():
        logits = model(ids[:, :-1])
    chances = logits.float().softmax(-1)
    logs = torch.log(chances + 1e-9)  # guilty
    return F.nll_loss(logs.flatten(0, 1), ids[:, 1:].flatten())


def clean_loss(model, ids):
    with mixed():
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def build(loss):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randint(VOCAB, (size, TIME + 1), device=device()))

    return steplab.UserModel(Decoder(WIDTH, LAYERS, VOCAB, TIME), batches, loss, TIME)


def faulty():
    return build(faulty_loss)


def clean():
    return build(clean_loss)
