"""A student learns from a larger teacher. The teacher runs without no_grad and only its result is
detached: all its activations are kept for a backward pass that never comes.
A good finding names the activations of the teacher, which no backward pass uses, and the line that
calls it.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the teacher runs with a graph, so all its activations are kept although only its detached logits are used",
    "FIX": "call the teacher under torch.no_grad",
}
BATCH, CONTEXT, VOCAB = by_device(16, 4), by_device(512, 128), by_device(8192, 256)
STUDENT, TEACHER = (by_device(512, 64), by_device(6, 2)), (by_device(1024, 128), by_device(24, 5))


def prepare():
    teacher = Decoder(*TEACHER, VOCAB, CONTEXT).to(device()).eval()
    student = Decoder(*STUDENT, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT), device=device()))
    return teacher, student, adamw(student), tokens


def update(student, optimizer, ids, goal):
    with mixed():
        logs = student(ids).flatten(0, 1).log_softmax(-1)
        loss = F.kl_div(logs, goal.flatten(0, 1), reduction="batchmean", log_target=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    teacher, student, optimizer, tokens = prepare()

    def step():
        ids = next(tokens)
        with mixed():
            goal = teacher(ids).log_softmax(-1)  # guilty
        return update(student, optimizer, ids, goal.detach())

    return step


def clean():
    teacher, student, optimizer, tokens = prepare()

    def step():
        ids = next(tokens)
        with mixed(), torch.no_grad():
            goal = teacher(ids).log_softmax(-1)
        return update(student, optimizer, ids, goal)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
