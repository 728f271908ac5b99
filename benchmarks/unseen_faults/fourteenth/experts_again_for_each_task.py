"""A feed ranks posts with a multi-gate mixture of experts: three tasks (click, like, watch time) share
eight experts, and each task has a gate of its own. The loop over the tasks calls the experts, which
see the same input each time, so that all of them run three times, forward and backward. Only the
gates differ.
A good finding names the experts computed again for each task with the same input and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all experts are computed again for every task, though only the gates differ",
    "FIX": "compute the experts once before the loop over the tasks",
}
BATCH, FIELDS, ITEMS = by_device(16_384, 256), by_device(32, 16), by_device(200_000, 5000)
EMBED, EXPERTS, HIDDEN, WIDTH = by_device(64, 16), 8, by_device(1024, 96), by_device(512, 32)
TASKS, FEATURES = 3, FIELDS * EMBED


class Experts(nn.Module):
    """All experts as one: (batch, features) to (batch, experts, width)."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(FEATURES, EXPERTS * HIDDEN)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, x):
        hidden = F.relu(self.up(x)).view(len(x), EXPERTS, HIDDEN).transpose(0, 1)
        return F.relu(torch.bmm(hidden, self.down.to(hidden.dtype))).transpose(0, 1)


class Ranker(nn.Module):
    def __init__(self, once):
        super().__init__()
        self.once = once
        self.fields = nn.Embedding(ITEMS, EMBED)
        self.experts = Experts()
        self.gates = nn.ModuleList(nn.Linear(FEATURES, EXPERTS) for _ in range(TASKS))
        self.towers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(TASKS))

    def forward(self, ids):
        x = self.fields(ids).flatten(1)
        given = self.experts(x) if self.once else None
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            if not self.once:
                given = self.experts(x)  # guilty
            weights = gate(x).softmax(-1).to(given.dtype)
            logits.append(tower((weights[:, None] @ given).squeeze(1)))
        return torch.cat(logits, 1)


def build(once):
    model = Ranker(once).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randint(ITEMS, (BATCH, FIELDS), device=device()),
            (torch.rand(BATCH, TASKS, device=device()) < 0.1).float(),
        )
    )

    def step():
        ids, labels = next(data)
        with mixed():
            loss = F.binary_cross_entropy_with_logits(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(once=False)


def clean():
    return build(once=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
