"""The compiled quantile loss of a forecaster divides by the number of valid hours, which it reads
with .item() in its loop over the quantiles: the graph breaks there, once per quantile.
A good finding names the breaks of the compiled graph, and the line with .item().
"""

import torch
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "item() in the loop of the compiled loss breaks its graph at every quantile",
    "FIX": "divide by the count as a tensor",
}
BATCH, PAST, AHEAD = by_device(2048, 1024), by_device(1024, 336), by_device(1024, 336)
WIDTH, QUANTILES = by_device(2048, 32), (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


def pinball(error, q):
    """Pinball loss, smoothed around zero."""
    size = error.abs()
    smooth = torch.where(size < 0.1, 5.0 * error * error, size - 0.05)
    return torch.where(error < 0, 1 - q, q) * smooth


def loss_reading(out, y, valid):
    total = 0.0
    for i, q in enumerate(QUANTILES):
        error = (y - out[:, i]) * valid
        total = total + (pinball(error, q) * valid).sum() / valid.sum().item()  # guilty
    return total / len(QUANTILES)


def loss_on_device(out, y, valid):
    total = 0.0
    for i, q in enumerate(QUANTILES):
        error = (y - out[:, i]) * valid
        total = total + (pinball(error, q) * valid).sum() / valid.sum()
    return total / len(QUANTILES)


def build(criterion):
    model = nn.Sequential(
        nn.Linear(PAST, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, len(QUANTILES) * AHEAD),
        nn.Unflatten(1, (len(QUANTILES), AHEAD)),
    ).to(device())
    optimizer = adamw(model)
    compiled = torch.compile(criterion)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, PAST, device=device()),
            torch.randn(BATCH, AHEAD, device=device()),
            (torch.rand(BATCH, AHEAD, device=device()) < 0.9).float(),
        )
    )

    def step():
        past, ahead, valid = next(data)
        with mixed():
            out = model(past)
        loss = compiled(out.float(), ahead, valid)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(loss_reading)


def clean():
    return build(loss_on_device)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
