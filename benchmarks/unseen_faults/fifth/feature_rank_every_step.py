"""Self-supervised training watches for a collapse of its features: the effective rank, which takes
the singular values of all features of the batch, is computed in every step.
A good finding names the singular values, which no update needs, and their line.
"""

from itertools import count

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the singular values of the batch's features are computed in every step for a log",
    "FIX": "compute the effective rank every few hundred steps",
}
BATCH, FEATURES, WIDTH, OUT = (
    by_device(2048, 320),
    by_device(1024, 128),
    by_device(4096, 320),
    by_device(1024, 256),
)
EVERY = 500


def prepare():
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, OUT),
    ).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def views():
        x = torch.randn(BATCH, FEATURES, device=device())
        return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)

    return model, optimizer, in_turn(views)


def update(model, optimizer, one, other):
    with mixed():
        features = F.normalize(model(torch.cat([one, other])), dim=-1)
        a, b = features.chunk(2)
        loss = F.cross_entropy(10 * a @ b.T, torch.arange(BATCH, device=a.device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), features.detach()


def effective_rank(features):
    share = F.normalize(torch.linalg.svdvals(features.float()), p=1, dim=0)
    return torch.special.entr(share).sum().exp()


def faulty():
    model, optimizer, batches = prepare()
    log = {}

    def step():
        loss, features = update(model, optimizer, *next(batches))
        log["rank"] = effective_rank(features)  # guilty
        return loss

    return step


def clean():
    model, optimizer, batches = prepare()
    log, number = {}, count(1)

    def step():
        loss, features = update(model, optimizer, *next(batches))
        if next(number) % EVERY == 0:
            log["rank"] = effective_rank(features)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
