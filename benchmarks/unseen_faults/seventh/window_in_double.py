"""The STFT loss of a vocoder takes its window from numpy, which makes it double. The signals were
made double to fit, so the whole loss, forward and backward, is computed in float64.
A good finding names the operators in double precision, and the line that makes them so.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "signals are cast to double to fit a window from numpy, so the spectral loss runs in float64",
    "FIX": "make the window float32: torch.hann_window, or astype(np.float32)",
}
BATCH, SAMPLES, WIDTH = by_device(64, 8), by_device(65_536, 8192), by_device(64, 8)
SIZES = (256, 512, 1024)


def prepare():
    model = nn.Sequential(
        nn.Conv1d(1, WIDTH, 9, padding=4), nn.LeakyReLU(0.1), nn.Conv1d(WIDTH, 1, 9, padding=4)
    ).to(device())
    data = in_turn(
        lambda: (
            torch.randn(BATCH, 1, SAMPLES, device=device()),
            torch.randn(BATCH, SAMPLES, device=device()),
        )
    )
    return model, adamw(model), data


def spectrum(signal, window):
    n = len(window)
    return torch.stft(signal, n, n // 4, window=window, return_complex=True).abs()


def faulty_loss(made, goal, windows):
    made, goal = made.double(), goal.double()  # guilty
    return sum(F.l1_loss(spectrum(made, w), spectrum(goal, w)) for w in windows)


def clean_loss(made, goal, windows):
    windows = [w.float() for w in windows]
    return sum(F.l1_loss(spectrum(made, w), spectrum(goal, w)) for w in windows)


def build(spectral):
    model, optimizer, data = prepare()
    windows = [torch.from_numpy(np.hanning(n)).to(device()) for n in SIZES]

    def step():
        noise, goal = next(data)
        with mixed():
            made = model(noise)[:, 0]
        loss = spectral(made.float(), goal, windows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(faulty_loss)


def clean():
    return build(clean_loss)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
