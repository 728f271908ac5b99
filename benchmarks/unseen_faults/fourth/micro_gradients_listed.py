"""Gradients are accumulated over micro-batches by cloning those of each into a list and averaging
the list at the end, so a copy of all gradients is alive per micro-batch.
A good finding names the copies of gradients as what holds the memory, and the line that clones
them.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "a copy of all gradients is kept per micro-batch until they are averaged",
    "FIX": "divide the loss and let backward add to .grad",
}
MICRO, BATCH, CONTEXT = by_device(8, 5), by_device(8, 2), by_device(512, 32)
WIDTH, LAYERS, VOCAB = by_device(1024, 256), by_device(12, 3), by_device(16_384, 1000)


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (MICRO * BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), tokens


def loss_of(model, ids):
    with mixed():
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def faulty():
    model, optimizer, tokens = prepare()
    parameters = list(model.parameters())

    def step():
        total, gradients = torch.zeros((), device=device()), []
        for ids in next(tokens).split(BATCH):
            loss = loss_of(model, ids)
            loss.backward()
            gradients.append([p.grad.clone() for p in parameters])  # guilty
            optimizer.zero_grad()
            total += loss.detach() / MICRO
        for p, parts in zip(parameters, zip(*gradients, strict=True), strict=True):
            p.grad = sum(parts) / MICRO
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def clean():
    model, optimizer, tokens = prepare()

    def step():
        total = torch.zeros((), device=device())
        for ids in next(tokens).split(BATCH):
            loss = loss_of(model, ids) / MICRO
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
