"""A sound classifier is trained on waveforms with random noise mixed in; log-mel features are computed on
the fly. The function for the features builds its bank of triangular mel filters, band by band, each
time it is called, although the bank depends on constants alone.
A good finding names the mel filter bank, built anew in each step (a loop over the bands), and a line of
its construction or the call of it.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the mel filter bank, a constant, is built band by band in every step",
    "FIX": "build the bank once and keep it",
}
BATCH, SAMPLES, CLASSES = by_device(128, 12), by_device(160_000, 16_000), by_device(527, 50)
RATE, POINTS, HOP, BANDS, WIDTH = 16_000, 512, 160, 128, by_device(256, 64)


def mel_filters():
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    edges = [700 * (10 ** (top * i / (BANDS + 1) / 2595) - 1) for i in range(BANDS + 2)]
    bank = []
    for low, middle, high in zip(edges, edges[1:], edges[2:], strict=False):
        band = []
        for k in range(POINTS // 2 + 1):
            frequency = k * RATE / POINTS
            rising, falling = (
                (frequency - low) / (middle - low),
                (high - frequency) / (high - middle),
            )
            band.append(max(0.0, min(rising, falling)))
        bank.append(band)
    return torch.tensor(bank, device=device())


class Features:
    def __init__(self):
        self.window = torch.hann_window(POINTS, device=device())

    def filters(self):
        return mel_filters()  # guilty

    def __call__(self, waves):
        spectra = torch.stft(waves, POINTS, HOP, window=self.window, return_complex=True)
        return (self.filters() @ spectra.abs().square() + 1e-6).log()


class FeaturesOfKeptBank(Features):
    def __init__(self):
        super().__init__()
        self.bank = mel_filters()

    def filters(self):
        return self.bank


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(BANDS, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x, _ = self.memory(x.transpose(1, 2))
        return self.head(x.mean(1))


def build(features):
    model = Classifier().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, SAMPLES, device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )

    def step():
        waves, labels = next(data)
        noisy = waves + 0.1 * torch.randn_like(waves)
        inputs = features(noisy)
        with mixed():
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Features())


def clean():
    return build(FeaturesOfKeptBank())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
