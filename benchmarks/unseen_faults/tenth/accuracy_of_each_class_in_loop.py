"""The script logs the accuracy of every class on its training batch: a loop over all classes masks
the predictions and reads one number after the other, in every step.
A good finding names the loop over the classes that reads each accuracy, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the accuracy of each class is masked, averaged and read on its own in every step",
    "FIX": "count hits per class with one bincount and read the result once, where it is logged",
}
BATCH, FEATURES, CLASSES, WIDTH = by_device(4096, 320), 64, 500, by_device(2048, 384)


def prepare():
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    ).to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    return model, adamw(model), data


def train(model, optimizer, x, y):
    with mixed():
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), logits.detach().argmax(-1) == y


def faulty():
    model, optimizer, data = prepare()
    log = {}

    def step():
        x, y = next(data)
        loss, hit = train(model, optimizer, x, y)
        for c in range(CLASSES):
            log[f"accuracy/{c}"] = hit[y == c].float().mean().item()  # guilty
        return loss

    return step


def clean():
    model, optimizer, data = prepare()
    log = {}

    def step():
        x, y = next(data)
        loss, hit = train(model, optimizer, x, y)
        count = torch.bincount(y, minlength=CLASSES)
        hits = torch.bincount(y, hit.float(), minlength=CLASSES)
        log.update((f"accuracy/{c}", a) for c, a in enumerate((hits / count).tolist()))
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
