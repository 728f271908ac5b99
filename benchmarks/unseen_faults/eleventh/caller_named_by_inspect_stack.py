"""A recommender predicts 48 kinds of response to an offer and notes the loss of each kind in a metric
logger, which names it after the function that notes it. It learns that name from inspect.stack().
A good finding names inspect.stack(), which looks up the source of every frame, in the metric logger.
"""

import inspect
import sys

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the metric logger calls inspect.stack() for the caller's name, which finds the source lines of all frames",
    "FIX": "take the caller's name from sys._getframe(1) or pass it as an argument",
}
BATCH, FEATURES, WIDTH = by_device(8192, 640), 64, by_device(1024, 320)
KINDS = [f"response{i}" for i in range(48)]


class Metrics:
    """The last value of every quantity; it is printed once per epoch."""

    def __init__(self):
        self.last = {}

    def note(self, name, value):
        caller = inspect.stack()[1].function  # guilty
        self.last[f"{caller}/{name}"] = value


class MetricsByFrame(Metrics):
    def note(self, name, value):
        caller = sys._getframe(1).f_code.co_name
        self.last[f"{caller}/{name}"] = value


def training(metrics):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, len(KINDS)),
    ).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randint(2, (BATCH, len(KINDS)), device=device()).float(),
        )
    )

    def losses(x, wanted):
        with mixed():
            logits = model(x).float()
        each = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(0)
        for kind, value in zip(KINDS, each.detach().unbind(), strict=True):
            metrics.note(kind, value)
        return each.mean()

    def step():
        x, wanted = next(data)
        loss = losses(x, wanted)
        loss.backward()
        metrics.note("loss", loss.detach())
        metrics.note("rate", optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        metrics.note("rows", BATCH)
        return loss.detach()

    return step


def faulty():
    return training(Metrics())


def clean():
    return training(MetricsByFrame())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
