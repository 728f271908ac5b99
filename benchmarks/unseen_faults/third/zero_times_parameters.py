"""Zero times the sum of all parameters is added to the loss, a trick against DDP's complaint about
unused parameters that was copied into a script for one device.
A good finding names the pass over all weights, the gradients of zeros (and their updates) that
exist only for it, and the line of the sum.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "0 * sum of all parameters in the loss: every weight is read, gets a gradient of zeros and an update, also in heads that this stage does not use",
    "FIX": "leave the term out: without DDP unused parameters may have no gradient",
}
BATCH, WIDTH, HEADS = by_device(4096, 128), by_device(2048, 1024), 6


class ManyHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(256, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()
        )
        self.heads = nn.ModuleDict(
            {
                f"task{i}": nn.Sequential(
                    nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 100)
                )
                for i in range(HEADS)
            }
        )

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def prepare():
    model = ManyHeads().to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 256, device=device()),
            torch.randint(100, (BATCH,), device=device()),
        )
    )
    return model, torch.optim.Adam(model.parameters(), lr=1e-4, fused=True), data


def faulty():
    model, optimizer, data = prepare()

    def step():
        x, y = next(data)
        with mixed():
            loss = F.cross_entropy(model(x, "task0"), y)
        loss = loss + 0.0 * sum(p.sum() for p in model.parameters())  # guilty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        x, y = next(data)
        with mixed():
            loss = F.cross_entropy(model(x, "task0"), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
