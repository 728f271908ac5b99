"""A small model is distilled from a larger one with two losses: its logits shall follow the teacher's,
and its last states the teacher's last states. The first loss came first; when the second was added,
it got its own call of the teacher, although the logits are one product away from those states.
A good finding names the second pass of the frozen teacher over the same batch and one of its lines.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the teacher runs twice over each batch, for its logits and again for its last states",
    "FIX": "run the teacher once and take the logits from the states by its head",
}
BATCH, CONTEXT, VOCAB = by_device(16, 4), by_device(512, 96), by_device(16_384, 256)
TEACHER, TEACHER_LAYERS = by_device(1024, 192), by_device(12, 3)
STUDENT, STUDENT_LAYERS = by_device(512, 64), by_device(4, 2)
TEMPERATURE = 2.0


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Decoder(STUDENT, STUDENT_LAYERS, VOCAB, CONTEXT)
        self.widen = nn.Linear(STUDENT, TEACHER)

    def forward(self, ids):
        states = self.student.hidden(ids)
        return self.student.head(states), self.widen(states)


def answers_apart(teacher, ids):
    logits = teacher(ids)
    states = teacher.hidden(ids)  # guilty
    return logits, states


def answers_together(teacher, ids):
    states = teacher.hidden(ids)
    return teacher.head(states), states


def distillation_loss(logits, taught):
    log_p = F.log_softmax(logits.float() / TEMPERATURE, -1).flatten(0, 1)
    log_q = F.log_softmax(taught.float() / TEMPERATURE, -1).flatten(0, 1)
    return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True) * TEMPERATURE**2


def build(answers):
    model = Distilled().to(device())
    teacher = Decoder(TEACHER, TEACHER_LAYERS, VOCAB, CONTEXT).to(device())
    teacher.requires_grad_(False).eval()
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT), device=device()))

    def step():
        ids = next(data)
        with mixed():
            with torch.no_grad():
                taught, goal = answers(teacher, ids)
            logits, states = model(ids)
            loss = distillation_loss(logits, taught) + F.mse_loss(states, goal)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(answers_apart)


def clean():
    return build(answers_together)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
