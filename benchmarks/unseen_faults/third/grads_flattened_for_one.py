"""Gradients are copied into one flat tensor, divided by the number of ranks and copied back, as for
an all-reduce, although there is one rank.
A good finding names the two copies of all gradients between backward and update, and the line that
concatenates them.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all gradients are flattened into one buffer, divided by a world size of 1 and copied back, without any communication",
    "FIX": "average gradients only if there is more than one rank",
}
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BATCH, WIDTH = by_device(1024, 16), by_device(4096, 2048)


def average_gradients(parameters):
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])  # guilty
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(flat)
    flat /= WORLD
    start = 0
    for p in parameters:
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


def build(average):
    model = nn.Sequential(
        nn.Linear(128, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 10),
    ).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 128, device=device()),
            torch.randint(10, (BATCH,), device=device()),
        )
    )
    parameters = list(model.parameters())

    def step():
        x, y = next(data)
        optimizer.zero_grad()
        with mixed():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        if average:
            average_gradients(parameters)
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return build(average=True)


def clean():
    return build(average=WORLD > 1)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
