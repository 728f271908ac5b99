"""A tabular transformer: each number becomes a token. First runs gave NaNs, so somebody turned
autograd's anomaly detection on. The cause was found and fixed long ago, the switch stayed: each operator
of the forward pass records its stack, each result of the backward pass is searched for NaN and waited for.
A good finding names the anomaly detection and the line that turns it on.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "torch.autograd.set_detect_anomaly(True) was left on after a search for NaNs",
    "FIX": "remove the switch; turn it on only to look for a NaN",
}
BATCH, COLUMNS, CLASSES = by_device(768, 72), by_device(63, 20), 10
WIDTH, LAYERS = by_device(512, 64), by_device(4, 2)


class TabularTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(COLUMNS, WIDTH) * 0.1)
        self.shift = nn.Parameter(torch.randn(COLUMNS, WIDTH) * 0.1)
        self.answer = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, WIDTH // 32) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, row):
        tokens = row.unsqueeze(-1) * self.scale + self.shift
        tokens = torch.cat([tokens, self.answer.expand(len(row), -1, -1)], dim=1)
        return self.head(self.norm(self.blocks(tokens)[:, -1]))


def look_for_nans():
    torch.autograd.set_detect_anomaly(True)  # guilty


def look_for_nothing():
    torch.autograd.set_detect_anomaly(False)


def build(debugging):
    debugging()
    model = TabularTransformer().to(device())
    optimizer = adamw(model)

    def rows():
        labels = torch.randint(CLASSES, (BATCH,), device=device())
        return torch.randn(BATCH, COLUMNS, device=device()), labels

    data = in_turn(rows)

    def step():
        columns, labels = next(data)
        with mixed():
            loss = F.cross_entropy(model(columns), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(look_for_nans)


def clean():
    return build(look_for_nothing)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
