"""A spotter of keywords reads 256 mu-law codes of a waveform. The samples of each batch are turned into
codes by np.vectorize of a scalar function.
A good finding names the mu-law encoding that runs in Python sample by sample, and the line that calls it.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "np.vectorize calls a Python function once for every audio sample of the batch",
    "FIX": "write the mu-law in numpy's array functions, which work on the whole batch",
}
BATCH, LENGTH, CLIPS, CLIP = by_device(64, 8), 4096, 32, 16000
WIDTH, CODES, WORDS = by_device(256, 64), 256, 35


def mu_law_code(sample):
    """Return the code of one sample between -1 and 1."""
    size = math.log1p((CODES - 1) * abs(sample)) / math.log(CODES)
    return int((math.copysign(size, sample) + 1) / 2 * (CODES - 1) + 0.5)


def mu_law_codes(samples):
    """Return the codes of an array of samples between -1 and 1."""
    size = np.log1p((CODES - 1) * np.abs(samples)) / math.log(CODES)
    return ((np.copysign(size, samples) + 1) / 2 * (CODES - 1) + 0.5).astype(np.int64)


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(CODES, 8)
        self.frames = nn.Linear(16 * 8, WIDTH)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, codes):
        x = self.frames(self.codes(codes).view(len(codes), -1, 16 * 8)).transpose(1, 2)
        for conv in self.convs:
            x = x + F.gelu(conv(x))
        return self.head(x.mean(2))


def training(encode):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    time = np.arange(CLIP) / 16000
    clips = np.stack([0.8 * np.sin(2 * np.pi * f * time) for f in rng.uniform(80, 800, CLIPS)])
    words = rng.integers(WORDS, size=CLIPS)
    model = Spotter().to(device())
    optimizer = adamw(model)

    def step():
        chosen, starts = rng.integers(CLIPS, size=BATCH), rng.integers(CLIP - LENGTH, size=BATCH)
        waves = np.stack([clips[c, s : s + LENGTH] for c, s in zip(chosen, starts, strict=True)])
        codes = torch.from_numpy(encode(waves)).to(device())
        with mixed():
            logits = model(codes)
        loss = F.cross_entropy(logits.float(), torch.from_numpy(words[chosen]).to(device()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(np.vectorize(mu_law_code, otypes=[np.int64]))  # guilty


def clean():
    return training(mu_law_codes)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
