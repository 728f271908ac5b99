"""An image classifier is fine-tuned in two stages: first all of it, then the head on a frozen backbone.
The optimizers of both stages are in a list, so the first one's moments stay in memory.
A good finding names the state of the first stage's optimizer, which nothing uses any more, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the first stage's optimizer stays alive and keeps two moments of every weight of the frozen backbone",
    "FIX": "drop the first optimizer before the second stage begins",
}
BATCH, SIDE, CLASSES = by_device(256, 16), 32, 100
WIDTH, LAYERS = by_device(4096, 1280), by_device(8, 6)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Flatten(), nn.Linear(3 * SIDE * SIDE, WIDTH), nn.GELU()]
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, CLASSES))


def prepare():
    torch.manual_seed(0)
    model = Classifier().to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 3, SIDE, SIDE, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    return model, data


def first_stage(model, optimizer, data):
    for _ in range(2):
        images, labels = next(data)
        with mixed():
            logits = model.head(model.backbone(images))
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.backbone.requires_grad_(False).eval()


def second_stage(model, optimizer, data):
    images, labels = next(data)
    with mixed():
        with torch.no_grad():
            features = model.backbone(images)
        logits = model.head(features)
    loss = F.cross_entropy(logits.float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, data = prepare()
    optimizers = [adamw(model)]  # guilty
    first_stage(model, optimizers[-1], data)
    optimizers.append(adamw(model.head))

    def step():
        return second_stage(model, optimizers[-1], data)

    return step


def clean():
    model, data = prepare()
    optimizer = adamw(model)
    first_stage(model, optimizer, data)
    optimizer = adamw(model.head)

    def step():
        return second_stage(model, optimizer, data)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
