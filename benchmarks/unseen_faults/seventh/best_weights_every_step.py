"""The upper layers of a network are fine-tuned. The best weights so far are remembered by a deep copy
of the whole state_dict, frozen layers and all, whenever the smoothed training loss falls below its
record. While training goes well that is after every single step.
A good finding names the copy of all weights in every step, and its line.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the state_dict is deep-copied at every new record of the training loss, which is in nearly every step",
    "FIX": "look for the best weights at evaluations, every few hundred steps",
}
BATCH, WIDTH, LAYERS, CLASSES = by_device(256, 16), by_device(4096, 1024), by_device(16, 12), 512
FROZEN, EVERY = by_device(12, 10), 500


def prepare():
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, WIDTH, device=device()),
            torch.randint(4, (BATCH,), device=device()),
        )
    )
    model[: 2 * FROZEN].requires_grad_(False)
    trained = model[2 * FROZEN :].parameters()
    optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)
    return model, optimizer, data


def train(model, optimizer, x, y):
    with mixed():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()
    smooth, record, best = 10.0, 10.0, {}

    def step():
        nonlocal smooth, record
        loss = train(model, optimizer, *next(data))
        smooth = 0.98 * smooth + 0.02 * loss.item()
        if smooth < record:
            record = smooth
            best["weights"] = copy.deepcopy(model.state_dict())  # guilty
        return loss

    return step


def clean():
    model, optimizer, data = prepare()
    smooth, record, best, done = 10.0, 10.0, {}, 0

    def step():
        nonlocal smooth, record, done
        loss = train(model, optimizer, *next(data))
        smooth = 0.98 * smooth + 0.02 * loss.item()
        done += 1
        if done % EVERY == 0 and smooth < record:
            record = smooth
            best["weights"] = copy.deepcopy(model.state_dict())
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
