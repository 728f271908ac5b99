"""Instance discrimination keeps one feature per image in a bank. Its rows are normalized when they
are written, yet the whole bank is normalized again in every step.
A good finding names the normalization of the whole bank, of which the step changes a few rows, and
its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole bank of features is normalized in every step although its rows are normalized when written",
    "FIX": "use the bank as it is",
}
BATCH, FEATURES, WIDTH, OUT = by_device(256, 4), by_device(512, 128), by_device(4096, 512), 128
IMAGES, KEEP = by_device(1_000_000, 60_000), 0.5


def prepare():
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, OUT),
    ).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    bank = F.normalize(torch.randn(IMAGES, OUT, device=device()), dim=1)
    batches = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randperm(IMAGES)[:BATCH].to(device()),
        )
    )
    return model, optimizer, bank, batches


def update(model, optimizer, x, numbers, rows):
    with mixed():
        features = F.normalize(model(x), dim=1)
        loss = F.cross_entropy(10 * features @ rows.T, numbers)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), features.detach()


def write(bank, numbers, features):
    bank[numbers] = F.normalize(KEEP * bank[numbers] + (1 - KEEP) * features, dim=1)


def faulty():
    model, optimizer, bank, batches = prepare()

    def step():
        x, numbers = next(batches)
        rows = F.normalize(bank, dim=1)  # guilty
        loss, features = update(model, optimizer, x, numbers, rows)
        write(bank, numbers, features)
        return loss

    return step


def clean():
    model, optimizer, bank, batches = prepare()

    def step():
        x, numbers = next(batches)
        loss, features = update(model, optimizer, x, numbers, bank)
        write(bank, numbers, features)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
