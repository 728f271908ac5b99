"""The line of the log that every step writes has the whole configuration of the run in it, with the
table of all labels, so tens of thousands of entries are turned into JSON text in every step.
A good finding names the making of the JSON text on the host, and the line.
"""

import json
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole configuration, with the table of all labels, is written as JSON in every line of the log",
    "FIX": "write the configuration once, when the run begins, and the numbers of the step in its line",
}
BATCH, TIME, WIDTH, TAGS = by_device(256, 8), 512, by_device(512, 96), 20_000


class Tagger(nn.Module):
    """A convnet over spectrograms; each clip has one of the broad classes."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv1d(64, WIDTH, 5, stride=2, padding=2)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(4, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, x):
        x = self.enter(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + F.relu(conv(norm(x)))
        return self.head(x.mean(-1))


def prepare():
    model = Tagger().to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 64, TIME, device=device()),
            torch.randint(64, (BATCH,), device=device()),
        )
    )
    config = {
        "batch": BATCH,
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "labels": {f"/m/{n:06x}": {"index": n, "broad": n % 64} for n in range(TAGS)},
    }
    return model, adamw(model), data, config, tempfile.TemporaryFile("w")


def train(model, optimizer, data):
    x, y = next(data)
    with mixed():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data, config, log = prepare()
    done = 0

    def step():
        nonlocal done
        loss = train(model, optimizer, data)
        done += 1
        record = {"step": done, "lr": optimizer.param_groups[0]["lr"], "config": config}
        log.write(json.dumps(record) + "\n")  # guilty
        return loss

    return step


def clean():
    model, optimizer, data, config, log = prepare()
    log.write(json.dumps(config) + "\n")
    done = 0

    def step():
        nonlocal done
        loss = train(model, optimizer, data)
        done += 1
        record = {"step": done, "lr": optimizer.param_groups[0]["lr"]}
        log.write(json.dumps(record) + "\n")
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
