"""Scheduled sampling mixes the model's own guesses into its input. In this stage of training the
ratio is 0, so no guess is ever taken, but the pass that makes the guesses still runs.
A good finding names the forward pass whose guesses are not used, and its line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the pass that guesses tokens for scheduled sampling runs while the ratio is 0",
    "FIX": "skip the guessing pass while the ratio is 0",
}
BATCH, CONTEXT = by_device(32, 4), by_device(512, 48)
WIDTH, LAYERS, VOCAB = by_device(768, 128), by_device(8, 3), by_device(16_384, 1000)
RATIO = 0.0


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    chance = torch.Generator(device()).manual_seed(1)
    size = (BATCH, CONTEXT + 1)
    data = in_turn(lambda: torch.randint(VOCAB, size, device=device(), generator=chance))
    return model, adamw(model), data


def learn(model, optimizer, ids, targets):
    with mixed():
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def mix(model, ids):
    with torch.no_grad(), mixed():
        guesses = model(ids).argmax(-1)  # guilty
    guesses = torch.cat([ids[:, :1], guesses[:, :-1]], 1)
    replaced = torch.rand(ids.shape, device=ids.device) < RATIO
    return torch.where(replaced, guesses, ids)


def faulty():
    model, optimizer, data = prepare()

    def step():
        tokens = next(data)
        ids, targets = tokens[:, :-1], tokens[:, 1:]
        return learn(model, optimizer, mix(model, ids), targets)

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        tokens = next(data)
        ids, targets = tokens[:, :-1], tokens[:, 1:]
        if RATIO > 0:
            ids = mix(model, ids)
        return learn(model, optimizer, ids, targets)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
