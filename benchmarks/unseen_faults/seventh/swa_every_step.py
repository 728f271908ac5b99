"""Stochastic weight averaging takes the weights once per epoch. Here update_parameters is called
after every step, and goes through all weights each time.
A good finding names the update of the averaged weights in every step, and its line.
"""

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the average of the weights, meant to be taken once per epoch, is updated after every step",
    "FIX": "call update_parameters at the end of an epoch",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(4, 2),
    by_device(256, 16),
    by_device(1024, 256),
    by_device(16, 4),
)
VOCAB, EPOCH = by_device(16_384, 4000), 500


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return model, AveragedModel(model), adamw(model), tokens


def train(model, optimizer, ids):
    with mixed():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, averaged, optimizer, tokens = prepare()

    def step():
        loss = train(model, optimizer, next(tokens))
        averaged.update_parameters(model)  # guilty
        return loss

    return step


def clean():
    model, averaged, optimizer, tokens = prepare()
    done = 0

    def step():
        nonlocal done
        loss = train(model, optimizer, next(tokens))
        done += 1
        if done % EPOCH == 0:
            averaged.update_parameters(model)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
