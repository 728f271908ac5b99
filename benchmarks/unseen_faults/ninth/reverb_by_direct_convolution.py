"""Recordings are augmented with the echo of a room by np.convolve, which multiplies every sample of
the recording with every sample of the echo. The same by FFT takes a small part of that.
A good finding names np.convolve, or the work of the dataset, and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the echo of a room is added by a direct convolution of thousands of samples with hundreds",
    "FIX": "convolve by FFT (np.fft.rfft, scipy.signal.fftconvolve)",
}
BATCH, SAMPLES, ECHO, ROOMS = by_device(128, 8), 16_000, 1600, 16
WIDTH, CLASSES = by_device(256, 32), 35
LENGTH = 18_000  # at least SAMPLES + ECHO - 1, with small factors


class Recordings(Dataset):
    def __init__(self):
        rng = np.random.default_rng(0)
        self.waves = rng.standard_normal((256, SAMPLES), np.float32)
        fading = np.exp(-np.arange(ECHO, dtype=np.float32) / 200)
        self.rooms = rng.standard_normal((ROOMS, ECHO), np.float32) * fading
        self.spectra = np.fft.rfft(self.rooms, LENGTH)
        self.rng = np.random.default_rng(1)

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        wet = self.echo(self.waves[index], self.rng.integers(ROOMS))
        return torch.from_numpy(wet.astype(np.float32)), index % CLASSES


class Direct(Recordings):
    def echo(self, wave, room):
        return np.convolve(wave, self.rooms[room])[:SAMPLES]  # guilty


class ByFFT(Recordings):
    def echo(self, wave, room):
        spectrum = np.fft.rfft(wave, LENGTH)
        spectrum *= self.spectra[room]
        return np.fft.irfft(spectrum, LENGTH)[:SAMPLES]


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv1d(1, WIDTH, 80, stride=16)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(4, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.enter(x[:, None])
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + F.relu(conv(norm(x)))
        return self.head(x.mean(-1))


def prepare(kind):
    model = Keywords().to(device())
    loader = DataLoader(kind(), BATCH, drop_last=True, pin_memory=device() == "cuda")
    data = (batch for _ in iter(int, 1) for batch in loader)
    optimizer = adamw(model)

    def step():
        x, y = (part.to(device(), non_blocking=True) for part in next(data))
        with mixed():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return prepare(Direct)


def clean():
    return prepare(ByFFT)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
