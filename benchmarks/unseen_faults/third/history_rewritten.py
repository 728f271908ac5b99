"""The whole history of the run, resumed after thousands of steps, is written to its JSON file again
in every step.
A good finding names the writing of a file by Python inside the step, and the line of json.dump.
"""

import json

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all metrics since step 0 are written as JSON again after every step",
    "FIX": "append one line per step",
}
BATCH, CONTEXT, WIDTH = by_device(256, 16), by_device(256, 48), by_device(1024, 256)
RESUMED_AT = 4000


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(1, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, series):
        return self.head(self.cell(series.unsqueeze(-1))[0]).squeeze(-1)


def rewrite(history):
    with open("history.json", "w") as file:
        json.dump(history, file, indent=2)  # guilty


def append(history):
    with open("history.jsonl", "a") as file:
        file.write(json.dumps(history[-1]) + "\n")


def build(log):
    model = Forecaster().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = in_turn(lambda: torch.randn(BATCH, CONTEXT + 1, device=device()).cumsum(1) / 8)
    history = [{"step": i, "loss": 1.0 / (i + 1), "lr": 1e-3} for i in range(RESUMED_AT)]

    def step():
        series = next(data)
        optimizer.zero_grad()
        with mixed():
            loss = F.huber_loss(model(series[:, :-1]), series[:, 1:])
        loss.backward()
        optimizer.step()
        history.append({"step": len(history), "loss": loss.item(), "lr": 1e-3})
        log(history)
        return loss.detach()

    return step


def faulty():
    return build(rewrite)


def clean():
    return build(append)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
