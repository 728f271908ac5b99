"""A tagger of music clips: several thousand tags, each present or not. The rows of tags come from
np.zeros, which is float64, so the loss over clips x tags is computed in double precision.
A good finding names the float64 targets that turn the loss into double, and the line that makes
them or the loss that takes them.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the tags come from np.zeros as float64, so the loss of all tags is in double",
    "FIX": "make the rows of tags with dtype=np.float32",
}
BATCH, FEATURES, TAGS = by_device(4096, 512), 128, by_device(8192, 3000)
WIDTH = by_device(1024, 48)


def rows_of_tags(present):
    rows = np.zeros((BATCH, TAGS))  # guilty
    np.put_along_axis(rows, present, 1.0, 1)
    return torch.from_numpy(rows)


def rows_of_tags_single(present):
    rows = np.zeros((BATCH, TAGS), dtype=np.float32)
    np.put_along_axis(rows, present, 1.0, 1)
    return torch.from_numpy(rows)


def training(rows):
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, TAGS),
    ).to(device())
    chance = np.random.default_rng(0)

    def batch():
        tags = rows(chance.integers(TAGS, size=(BATCH, 12)))
        return torch.randn(BATCH, FEATURES, device=device()), tags.to(device())

    optimizer, data = adamw(model), in_turn(batch)

    def step():
        x, tags = next(data)
        with mixed():
            logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits.float(), tags)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(rows_of_tags)


def clean():
    return training(rows_of_tags_single)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
