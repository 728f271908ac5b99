"""A speech enhancer is trained with a loss over spectrograms of three resolutions. The windows come
from `np.hanning`, as in the notebook that the loss was taken from, and numpy has doubles: from the
product with the window on, all of the loss and its backward pass are in fp64, unasked.
A good finding names the spectrograms (or the loss) computed in fp64 and the line, or the line where
the window is made.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the window of the spectrogram is a float64 array, so the whole loss is computed in fp64",
    "FIX": "make the windows float32",
    "BATCH": 32,
    "CPU_BATCH": 8,
}
SAMPLES, WIDTH, LAYERS = by_device(64_000, 12_000), by_device(128, 24), by_device(6, 2)
SIZES = (512, 1024, 2048) if by_device(1, 0) else (128, 256, 512)


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv1d(1, WIDTH, 16, stride=8, padding=4)
        self.layers = nn.ModuleList(
            nn.Conv1d(WIDTH, WIDTH, 3, padding=2**i, dilation=2**i) for i in range(LAYERS)
        )
        self.end = nn.ConvTranspose1d(WIDTH, 1, 16, stride=8, padding=4)

    def forward(self, noisy):
        x = self.start(noisy[:, None])
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.end(x)[:, 0]


class SpectralLoss(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        for size in SIZES:
            window = torch.from_numpy(np.hanning(size).astype(dtype))
            self.register_buffer(f"window{size}", window)

    def spectrum(self, waves, size):
        frames = waves.unfold(-1, size, size // 4)
        frames = frames * getattr(self, f"window{size}")  # guilty
        return torch.fft.rfft(frames).abs().clamp(min=1e-5)

    def forward(self, guess, truth):
        total = 0.0
        for size in SIZES:
            ours, theirs = self.spectrum(guess, size), self.spectrum(truth, size)
            total = total + (ours - theirs).norm() / theirs.norm()
            total = total + F.l1_loss(ours.log(), theirs.log())
        return total / len(SIZES)


class WithLoss(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.enhancer, self.loss = Enhancer(), SpectralLoss(dtype)

    def forward(self, noisy, truth):
        with mixed():
            guess = self.enhancer(noisy)
        return self.loss(guess.float(), truth)


def loss_of(model, batch):
    noisy, truth = batch
    return model(noisy, truth)


def batches(size):
    def make():
        truth = torch.randn(size, SAMPLES, device=device())
        return truth + 0.3 * torch.randn_like(truth), truth

    return in_turn(make)


def build(dtype):
    import steplab

    return steplab.UserModel(WithLoss(dtype), batches, loss_of, optimizer=adamw)


def faulty():
    return build(np.float64)


def clean():
    return build(np.float32)
