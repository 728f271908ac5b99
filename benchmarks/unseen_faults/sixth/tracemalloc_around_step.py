"""After a hunt for a leak, the loop still logs the peak of Python's own memory in every step. To know
it, tracemalloc notes the call stack of every single object that Python allocates meanwhile.
A good finding names the host's time, or tracemalloc as the tool that was left on, and the line that
starts it.
"""

import tracemalloc

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "tracemalloc was left on and notes a stack for every Python object that the step allocates",
    "FIX": "leave it out, or look at one step only",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(2, 2),
    by_device(128, 24),
    by_device(256, 128),
    by_device(16, 12),
)
VOCAB = by_device(2048, 200)


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), tokens


def update(model, optimizer, ids):
    with mixed():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, tokens = prepare()
    log = {"peak": 0}

    def step():
        tracemalloc.start(25)  # guilty
        loss = update(model, optimizer, next(tokens))
        log["peak"] = max(log["peak"], tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        return loss

    return step


def clean():
    model, optimizer, tokens = prepare()

    def step():
        return update(model, optimizer, next(tokens))

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
