"""A tagger of bird songs takes batches of recordings at 44.1 kHz and brings them to 16 kHz on the
device, with a windowed sinc, before its first layer. The function that does it takes two rates, as
`torchaudio.functional.resample` does, and works out its filter bank at each call, with numpy in
double precision, although the rates are always these two.
A good finding names the filter that the host computes anew in each step and the line, of the call or
in the function.
"""

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the filter bank for resampling is computed anew on the host in every step",
    "FIX": "make the filter once and keep it (functools.cache, transforms.Resample)",
}
BATCH, SECONDS = by_device(64, 8), by_device(4, 1)
RECORDED, RATE, ZEROS, BETA = 44_100, 16_000, 96, 14.8
WIDTH, LAYERS, SPECIES = by_device(512, 160), by_device(8, 4), 264


def sinc_filter(before, after):
    """Return the filters (phase, 1, taps), the stride, and how far they reach to a side."""
    common = math.gcd(before, after)
    before, after = before // common, after // common
    cutoff = min(before, after) * 0.99
    reach = math.ceil(ZEROS * before / cutoff)
    taps = np.arange(-reach, reach + before)[None] / before
    t = (taps - np.arange(after)[:, None] / after) * cutoff
    t = np.clip(t, -ZEROS, ZEROS)
    window = np.i0(BETA * np.sqrt(1 - (t / ZEROS) ** 2)) / np.i0(BETA)
    taps = np.sinc(t) * window * (cutoff / before)
    taps = torch.from_numpy(taps.astype(np.float32))[:, None]
    return taps.to(device(), non_blocking=True), before, reach


def resample(waves, before, after, filter_of):
    taps, stride, reach = filter_of(before, after)  # guilty
    length = waves.shape[-1] * after // before
    phases = F.conv1d(F.pad(waves[:, None], (reach, reach + stride)), taps, stride=stride)
    return phases.transpose(1, 2).flatten(1)[:, :length]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv1d(1, WIDTH, 400, stride=160)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, SPECIES)

    def forward(self, waves):
        x = F.gelu(self.start(waves[:, None]))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x.mean(-1))


def build(filter_of):
    model = Tagger().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, SECONDS * RECORDED, device=device()),
            torch.randint(SPECIES, (BATCH,), device=device()),
        )
    )

    def step():
        waves, species = next(data)
        waves = resample(waves, RECORDED, RATE, filter_of)
        with mixed():
            loss = F.cross_entropy(model(waves), species)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return build(sinc_filter)


def clean():
    return build(functools.cache(sinc_filter))


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
