"""The area under the ROC curve of the latest batches is computed for the progress bar after every
step: the scores of the whole window are joined and sorted again each time.
A good finding names the sorting and summing of old scores as work that is no part of the training
step, and the line that calls the metric.
"""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the AUROC of a window of batches is computed from scratch after every step",
    "FIX": "compute it where it is written, every few hundred steps",
}
BATCH, FEATURES, WIDTH = by_device(16_384, 1024), by_device(256, 64), by_device(2048, 512)
WINDOW, EVERY = by_device(256, 96), 500


def auroc(scores, labels):
    order = scores.argsort(descending=True)
    hits = labels[order]
    positives, negatives = hits.cumsum(0), (1 - hits).cumsum(0)
    return torch.trapezoid(positives / positives[-1], negatives / negatives[-1])


def build(every):
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 1),
        nn.Flatten(0),
    ).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randint(2, (BATCH,), device=device()).float(),
        )
    )
    window, log, done = deque(maxlen=WINDOW), {}, 0
    for _ in range(WINDOW):  # the window of a run that is well under way
        window.append((torch.rand(BATCH, device=device()), next(rows)[1]))

    def step():
        nonlocal done
        x, y = next(rows)
        with mixed():
            logits = model(x)
            loss = F.binary_cross_entropy_with_logits(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        window.append((logits.detach(), y))
        done += 1
        if done % every == 0:
            scores, labels = (torch.cat(part) for part in zip(*window, strict=True))
            log["auroc"] = auroc(scores, labels)  # guilty
        return loss.detach()

    return step


def faulty():
    return build(1)


def clean():
    return build(EVERY)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
