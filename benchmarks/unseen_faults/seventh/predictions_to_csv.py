"""The predictions and the targets of every training batch are written to a CSV file, row by row, in
case somebody wants to look at them.
A good finding names the writing of the file, or the host's work on single numbers, and the line.
"""

import csv
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "predictions and targets of every sample are written to a CSV file in every step",
    "FIX": "write those of the validation set, once per epoch",
}
BATCH, FEATURES, WIDTH, OUTPUTS = by_device(4096, 1536), 64, by_device(4096, 320), 8
EVERY = 500


def prepare():
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, OUTPUTS),
    ).to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randn(BATCH, OUTPUTS, device=device()),
        )
    )
    return model, adamw(model), data, tempfile.TemporaryFile("w", newline="")


def write(file, guess, y):
    writer = csv.writer(file)
    for row in torch.cat([guess.float(), y], 1).tolist():
        writer.writerow([f"{v:.5f}" for v in row])


def train(model, optimizer, x, y):
    with mixed():
        guess = model(x)
        loss = F.mse_loss(guess, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), guess.detach()


def faulty():
    model, optimizer, data, file = prepare()

    def step():
        x, y = next(data)
        loss, guess = train(model, optimizer, x, y)
        write(file, guess, y)  # guilty
        return loss

    return step


def clean():
    model, optimizer, data, file = prepare()
    done = 0

    def step():
        nonlocal done
        x, y = next(data)
        loss, guess = train(model, optimizer, x, y)
        done += 1
        if done % EVERY == 0:
            write(file, guess, y)
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
