"""To find out whether two runs stay the same, the SHA-256 of all weights is logged after every
step: the weights are copied as bytes and hashed on the host.
A good finding names the time that the host spends on the hash, and its line.
"""

import hashlib
from itertools import count

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a hash of all weights is computed on the host after every step",
    "FIX": "hash them every few hundred steps, or compare the losses",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(16, 2),
    by_device(512, 48),
    by_device(768, 192),
    by_device(12, 3),
)
VOCAB, EVERY = by_device(16_384, 1000), 500


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), tokens


def checksum(model):
    total = hashlib.sha256()
    for p in model.parameters():
        total.update(p.detach().cpu().numpy().tobytes())
    return total.hexdigest()


def update(model, optimizer, ids):
    with mixed():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, tokens = prepare()
    log = {}

    def step():
        loss = update(model, optimizer, next(tokens))
        log["weights"] = checksum(model)  # guilty
        return loss

    return step


def clean():
    model, optimizer, tokens = prepare()
    log, number = {}, count(1)

    def step():
        loss = update(model, optimizer, next(tokens))
        if next(number) % EVERY == 0:
            log["weights"] = checksum(model)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
