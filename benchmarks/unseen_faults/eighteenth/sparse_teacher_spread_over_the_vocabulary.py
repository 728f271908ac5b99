"""A small model learns from a large one whose sixteen likeliest tokens per position were stored with their
probabilities. To use the ready-made kl_div, the loss writes them into a tensor of zeros as wide as the
vocabulary; so it takes logarithms and products of thousands of zeros per position, forward and backward.
The student's log-probabilities gathered at the stored tokens give the same number.
A good finding names the mostly-zero target as wide as the vocabulary (or the kl_div over it) and its line.
"""

import steplab
import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "sixteen teacher probabilities become a dense target over the vocabulary for kl_div",
    "FIX": "gather the student's log-probabilities at the stored tokens and sum over those alone",
    "BATCH": 8,
    "CPU_BATCH": 4,
}
CONTEXT, VOCAB, KEPT = by_device(512, 64), by_device(32_000, 6000), 16
WIDTH, LAYERS = by_device(512, 48), by_device(6, 2)


def dense_loss(model, batch):
    ids, tokens, chances = batch
    with mixed():
        log_student = model(ids).float().log_softmax(-1)
    teacher = torch.zeros_like(log_student).scatter_(-1, tokens, chances)
    return F.kl_div(log_student.flatten(0, 1), teacher.flatten(0, 1), reduction="batchmean")  # guilty


def kept_loss(model, batch):
    ids, tokens, chances = batch
    with mixed():
        log_student = model(ids).float().log_softmax(-1)
    apart = chances * (chances.log() - log_student.gather(-1, tokens))
    return apart.sum(-1).mean()


def lessons(size):
    def make():
        ids = torch.randint(VOCAB, (size, CONTEXT), device=device())
        tokens = torch.rand(size, CONTEXT, VOCAB, device=device()).topk(KEPT, -1).indices
        return ids, tokens, torch.randn(size, CONTEXT, KEPT, device=device()).softmax(-1)

    return in_turn(make, 4)


class Student(Decoder):
    def __init__(self):
        super().__init__(WIDTH, LAYERS, VOCAB, CONTEXT)


def faulty():
    return steplab.UserModel(Student(), lessons, dense_loss, optimizer=adamw)


def clean():
    return steplab.UserModel(Student(), lessons, kept_loss, optimizer=adamw)
