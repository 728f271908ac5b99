"""The learning rate, the weight decay and the teacher's momentum each follow a cosine over the
whole training, and the function that makes such a list of values is called in every step for one of
them.
A good finding names the Python code that builds the schedules inside the step, and the line of the
comprehension or one that calls it.
"""

import math

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "schedules of all training steps are built in Python in every step, of which one value each is used",
    "FIX": "build them once before the loop",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(32, 4),
    by_device(512, 64),
    by_device(768, 128),
    by_device(6, 3),
)
VOCAB, TOTAL, WARMUP = by_device(16_384, 1000), by_device(300_000, 40_000), 1000


def cosine(first, last, warmup=0):
    rise = [first * i / warmup for i in range(warmup)]
    rest, half = TOTAL - warmup, (first - last) / 2
    fall = [last + half * (1 + math.cos(math.pi * i / rest)) for i in range(rest)]  # guilty
    return rise + fall


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), tokens


def update(model, optimizer, ids, rate, decay):
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = rate, decay
    with mixed():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, tokens = prepare()
    done = 0

    def step():
        nonlocal done
        rate, decay = cosine(3e-4, 3e-5, WARMUP)[done], cosine(0.04, 0.4)[done]
        done += 1
        return update(model, optimizer, next(tokens), rate, decay)

    return step


def clean():
    model, optimizer, tokens = prepare()
    rates, decays = cosine(3e-4, 3e-5, WARMUP), cosine(0.04, 0.4)
    done = 0

    def step():
        nonlocal done
        rate, decay = rates[done], decays[done]
        done += 1
        return update(model, optimizer, next(tokens), rate, decay)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
