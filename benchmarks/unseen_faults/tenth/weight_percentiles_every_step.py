"""The script logs the percentiles of every weight tensor and computes them in every step, although
the log takes them only once in a hundred steps.
A good finding names the quantiles of all weights, which sort each tensor, and their line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "percentiles of all weights are computed, by sorting, in every step for a log",
    "FIX": "compute them only in the steps that are logged",
}
BATCH, FEATURES, CLASSES = by_device(2048, 1024), 64, 20
WIDTH, LAYERS, EVERY = by_device(2048, 256), by_device(6, 3), 100


def prepare():
    layers = [nn.Linear(FEATURES, WIDTH), nn.ReLU()]
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )
    return model, adamw(model), data, torch.tensor([0.01, 0.5, 0.99], device=device())


def train(model, optimizer, batch):
    x, y = batch
    with mixed():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data, at = prepare()
    log, count = [], 0

    def step():
        nonlocal count
        count += 1
        loss = train(model, optimizer, next(data))
        stats = {n: p.detach().quantile(at) for n, p in model.named_parameters()}  # guilty
        if count % EVERY == 0:
            log.append({n: s.tolist() for n, s in stats.items()})
        return loss

    return step


def clean():
    model, optimizer, data, at = prepare()
    log, count = [], 0

    def step():
        nonlocal count
        count += 1
        loss = train(model, optimizer, next(data))
        if count % EVERY == 0:
            stats = {n: p.detach().quantile(at) for n, p in model.named_parameters()}
            log.append({n: s.tolist() for n, s in stats.items()})
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
