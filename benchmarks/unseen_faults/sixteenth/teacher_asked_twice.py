"""A small language model is distilled from a larger one, on its logits and on its last states. Two terms
of the loss were written at different times, and each asks the teacher for itself: one calls it for
the logits, the other calls it again for the states from which those logits were made.
A good finding names the teacher's second pass over the same tokens, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the teacher runs twice over the same batch, for its logits and for its states",
    "FIX": "run it once for the states and make the logits from them",
    "BATCH": 16,
    "CPU_BATCH": 6,
}
VOCAB, CONTEXT = by_device(32_000, 500), by_device(512, 64)
TEACHER = by_device(1024, 192), by_device(16, 4)
STUDENT = by_device(512, 96), by_device(6, 2)


class Distilled(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.ask = ask
        self.teacher = Decoder(*TEACHER, VOCAB, CONTEXT).requires_grad_(False).eval()
        self.student = Decoder(*STUDENT, VOCAB, CONTEXT)
        self.widen = nn.Linear(STUDENT[0], TEACHER[0])

    def forward(self, ids):
        with torch.no_grad():
            wanted_logits, wanted_states = self.ask(self.teacher, ids)
        states = self.student.hidden(ids)
        log_probs = F.log_softmax(self.student.head(states).flatten(0, 1).float(), -1)
        wanted = F.log_softmax(wanted_logits.flatten(0, 1).float(), -1)
        far = F.kl_div(log_probs, wanted, reduction="batchmean", log_target=True)
        return far + F.mse_loss(self.widen(states), wanted_states)


def twice(teacher, ids):
    logits = teacher(ids)
    states = teacher.hidden(ids)  # guilty
    return logits, states


def once(teacher, ids):
    states = teacher.hidden(ids)
    return teacher.head(states), states


def loss_of(model, ids):
    with mixed():
        return model(ids)


def batches(size):
    return in_turn(lambda: torch.randint(VOCAB, (size, CONTEXT), device=device()))


def build(ask):
    import steplab

    return steplab.UserModel(Distilled(ask), batches, loss_of, optimizer=adamw)


def faulty():
    return build(twice)


def clean():
    return build(once)
