"""A segmentation loop keeps logits and probabilities of the whole last batch in a dict, with their
graph, for a plot of one image at the end of the epoch; they are alive during the next step.
A good finding names the logits and probabilities that outlive the step, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "logits and probabilities of the whole last batch are kept for a plot of one image",
    "FIX": "keep the argmax of the one image that is plotted",
}
BATCH, SIZE, CLASSES = by_device(32, 4), by_device(256, 96), by_device(150, 100)
WIDTH = by_device(64, 16)


def prepare():
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, CLASSES, 1),
    ).to(device())
    chance = torch.Generator(device()).manual_seed(1)

    def batch():
        images = torch.randn(BATCH, 3, SIZE, SIZE, device=device(), generator=chance)
        where = (BATCH, SIZE, SIZE)
        return images, torch.randint(CLASSES, where, device=device(), generator=chance)

    return model, adamw(model), in_turn(batch, 2)


def update(optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()
    last = {}

    def step():
        images, masks = next(data)
        with mixed():
            logits = model(images)
            loss = F.cross_entropy(logits, masks)
        last.update(logits=logits, probabilities=logits.softmax(1))  # guilty
        return update(optimizer, loss)

    return step


def clean():
    model, optimizer, data = prepare()
    last = {}

    def step():
        images, masks = next(data)
        with mixed():
            logits = model(images)
            loss = F.cross_entropy(logits, masks)
        last.update(prediction=logits[0].detach().argmax(0))
        del logits
        return update(optimizer, loss)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
