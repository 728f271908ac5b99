"""A student learns from one of four teachers, drawn anew in each step. All four run on the batch,
their logits are stacked, and one of the four is then taken.
A good finding names the teachers whose logits are not used, and the line that runs them all.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all four teachers run on the batch although the loss uses the one drawn for the step",
    "FIX": "draw the teacher first and run only that one",
}
BATCH, FEATURES, CLASSES, TEACHERS = by_device(4096, 512), 64, 50, 4
WIDTH, TEACHER = by_device(1024, 256), by_device(2048, 384)


def network(width):
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, CLASSES),
    ).to(device())


def prepare():
    student = network(WIDTH)
    teachers = [network(TEACHER).requires_grad_(False).eval() for _ in range(TEACHERS)]
    data = in_turn(lambda: torch.randn(BATCH, FEATURES, device=device()))
    return student, teachers, adamw(student), data, random.Random(0)


def learn(student, optimizer, x, wanted):
    with mixed():
        logits = student(x)
    targets = F.softmax(wanted.float() / 2, -1)
    loss = F.kl_div(F.log_softmax(logits.float() / 2, -1), targets, reduction="batchmean")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    student, teachers, optimizer, data, chance = prepare()

    def step():
        x = next(data)
        with torch.no_grad(), mixed():
            wanted = torch.stack([teacher(x) for teacher in teachers])  # guilty
        return learn(student, optimizer, x, wanted[chance.randrange(TEACHERS)])

    return step


def clean():
    student, teachers, optimizer, data, chance = prepare()

    def step():
        x = next(data)
        with torch.no_grad(), mixed():
            wanted = teachers[chance.randrange(TEACHERS)](x)
        return learn(student, optimizer, x, wanted)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
