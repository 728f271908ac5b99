"""A language model with gradients accumulated over sixteen micro-batches. Their norm is
taken after each of them for the log, by a call of clip_grad_norm_ with an infinite limit.
A good finding names the norms of the gradients taken in every micro-batch, and their line.
"""

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the gradients are measured and scaled after every micro-batch, only for a log",
    "FIX": "log the norm that the one clip_grad_norm_ before the update returns",
}
WIDTH, LAYERS, VOCAB = by_device(768, 192), by_device(8, 2), by_device(32000, 3000)
CONTEXT, SIZE, MICRO = by_device(256, 8), by_device(2, 1), 16


def prepare():
    torch.manual_seed(0)
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    shape = (MICRO, SIZE, CONTEXT + 1)
    data = in_turn(lambda: torch.randint(VOCAB, shape, device=device()))
    return model, adamw(model), data


def backward(model, ids):
    with mixed():
        logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()) / MICRO
    loss.backward()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()
    log = {}

    def step():
        total = 0
        for i, ids in enumerate(next(data)):
            total = total + backward(model, ids)
            log[f"norm_{i}"] = clip_grad_norm_(model.parameters(), float("inf"))  # guilty
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def clean():
    model, optimizer, data = prepare()
    log = {}

    def step():
        total = 0
        for ids in next(data):
            total = total + backward(model, ids)
        log["norm"] = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
