"""Three tasks share a trunk. Each task's loss has a backward pass of its own with
retain_graph=True, so the trunk's backward pass is computed three times.
A good finding names the several backward passes through the trunk, or retain_graph, and the line of
backward.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "every task's loss is backpropagated on its own through the trunk that all tasks share",
    "FIX": "add the losses up and call backward once",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(32, 4),
    by_device(256, 48),
    by_device(768, 128),
    by_device(8, 3),
)
FEATURES, TASKS = 32, 3


class ManyTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.trunk = nn.Sequential(*(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(TASKS))

    def forward(self, x):
        x = self.trunk(self.embed(x)).mean(1)
        return [head(x) for head in self.heads]


def prepare():
    model = ManyTasks().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batches = in_turn(
        lambda: (
            torch.randn(BATCH, CONTEXT, FEATURES, device=device()),
            torch.randint(8, (TASKS, BATCH), device=device()),
        )
    )
    return model, optimizer, batches


def losses(model, x, targets):
    with mixed():
        return [F.cross_entropy(y, t) for y, t in zip(model(x), targets, strict=True)]


def faulty():
    model, optimizer, batches = prepare()

    def step():
        parts = losses(model, *next(batches))
        for loss in parts:
            loss.backward(retain_graph=True)  # guilty
        optimizer.step()
        optimizer.zero_grad()
        return sum(parts).detach()

    return step


def clean():
    model, optimizer, batches = prepare()

    def step():
        loss = sum(losses(model, *next(batches)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
