"""A language model is trained with label smoothing, which the script adds by hand: the cross-entropy
of the targets plus the mean of a log_softmax over the whole vocabulary. So the largest tensor
of the step is cast and normalized twice, and each log_softmax has a backward of its own. The
argument label_smoothing of cross_entropy needs one.
A good finding names the second log_softmax of the logits and the line.
"""

import steplab
import torch
import torch.nn.functional as F

from common import Decoder, by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32,
    "CPU_BATCH": 4,
    "CAUSE": "label smoothing by hand takes a second log_softmax of the logits of the whole vocabulary",
    "FIX": "use cross_entropy with label_smoothing",
}
TIME, VOCAB = by_device(512, 64), by_device(49152, 8192)
WIDTH, LAYERS, SMOOTH = by_device(512, 64), by_device(3, 1), 0.1


def by_hand(logits, targets):
    likely = F.cross_entropy(logits, targets)
    uniform = -F.log_softmax(logits, -1).mean()  # guilty
    return (1 - SMOOTH) * likely + SMOOTH * uniform


def built_in(logits, targets):
    return F.cross_entropy(logits, targets, label_smoothing=SMOOTH)


def build(criterion):
    my_turn()

    def batch(size):
        return torch.randint(VOCAB, (size, TIME + 1), device=device())

    def loss(model, ids):
        with mixed():
            return criterion(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return steplab.UserModel(
        Decoder(WIDTH, LAYERS, VOCAB, TIME),
        lambda size: in_turn(lambda: batch(size), 4),
        loss,
        unit="sequences",
    )


def faulty():
    return build(by_hand)


def clean():
    return build(built_in)
