"""Each batch is drawn by shuffling the numbers of all samples and taking the first few.
A good finding names the permutation of the whole dataset for one batch, and the line of randperm.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a permutation of all samples is drawn for every batch, of which it uses a few numbers",
    "FIX": "torch.randint, or one permutation per epoch",
}
SAMPLES, FEATURES = by_device(100_000_000, 2_000_000), 4
BATCH, WIDTH = by_device(8192, 1024), by_device(2048, 512)


def shuffled(x):
    return torch.randperm(len(x), device=x.device)[:BATCH]  # guilty


def drawn(x):
    return torch.randint(len(x), (BATCH,), device=x.device)


def build(choose):
    x = torch.randn(SAMPLES, FEATURES, device=device())
    y = x.square().sum(1, keepdim=True)
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, 1),
    ).to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def step():
        index = choose(x)
        optimizer.zero_grad()
        with mixed():
            loss = F.mse_loss(model(x[index]), y[index])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return build(shuffled)


def clean():
    return build(drawn)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
