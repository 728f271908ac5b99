"""Weight decay is a term of the loss, the sum of the squares of all weights, and so goes through
autograd: squares and sums forward, products and sums of gradients backward.
A good finding names the penalty over all parameters that the optimizer could do within its update,
and the line that adds it up.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "weight decay is the sum of all squared weights in the loss, with a forward and backward pass of its own",
    "FIX": "weight_decay of the optimizer: the same for SGD",
}
BATCH, FEATURES, WIDTH, LAYERS = (
    by_device(4096, 64),
    by_device(512, 64),
    by_device(2048, 512),
    by_device(12, 8),
)
DECAY = 1e-4


def prepare(decay):
    layers = [nn.Linear(FEATURES, WIDTH), nn.GELU()]
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device())
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=decay, fused=True
    )
    rows = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randint(10, (BATCH,), device=device()),
        )
    )
    return model, optimizer, rows


def faulty():
    model, optimizer, rows = prepare(0.0)

    def step():
        x, y = next(rows)
        with mixed():
            loss = F.cross_entropy(model(x), y)
            penalty = sum(p.pow(2).sum() for p in model.parameters())  # guilty
        (loss + DECAY / 2 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def clean():
    model, optimizer, rows = prepare(DECAY)

    def step():
        x, y = next(rows)
        with mixed():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
