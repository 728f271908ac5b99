"""The transform that makes a mel spectrogram of a recording is constructed in __getitem__, so its bank
of filters, which is always the same, is computed for every recording.
A good finding names the step's wait for data, or the computing of the filters, and the line that
constructs the transform.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the mel transform, with its bank of filters, is constructed anew for every recording",
    "FIX": "construct it once in __init__",
}
BATCH, LENGTH, WIDTH = by_device(32, 4), by_device(64_000, 8000), by_device(256, 64)
WINDOW, MELS, RATE, SAMPLES, CLASSES = 1024, 128, 16_000, 64, 20


class Mel:
    def __init__(self):
        self.window = torch.hann_window(WINDOW)
        bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
        top = 2595 * np.log10(1 + RATE / 2 / 700)
        edges = 700 * (10 ** (np.linspace(0, top, MELS + 2) / 2595) - 1)
        bank = np.zeros((len(bins), MELS), np.float32)
        for i in range(MELS):
            rise = (bins - edges[i]) / (edges[i + 1] - edges[i])
            fall = (edges[i + 2] - bins) / (edges[i + 2] - edges[i + 1])
            bank[:, i] = np.maximum(0, np.minimum(rise, fall))
        self.bank = torch.from_numpy(bank)

    def __call__(self, wave):
        spectrum = torch.stft(wave, WINDOW, WINDOW // 2, window=self.window, return_complex=True)
        return ((spectrum.abs().square().T @ self.bank) + 1e-6).log().T


class Recordings(Dataset):
    def __init__(self):
        self.waves = torch.randn(SAMPLES, LENGTH)
        self.classes = torch.randint(CLASSES, (SAMPLES,)).tolist()
        self.mel = Mel()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return self.mel(self.waves[i]), self.classes[i]


class Constructing(Recordings):
    def __getitem__(self, i):
        mel = Mel()  # guilty
        return mel(self.waves[i]), self.classes[i]


def build(dataset):
    model = nn.Sequential(
        nn.Conv1d(MELS, 4 * WIDTH, 5, padding=2),
        nn.ReLU(),
        nn.Conv1d(4 * WIDTH, 8 * WIDTH, 5, padding=2),
        nn.ReLU(),
        nn.Conv1d(8 * WIDTH, 8 * WIDTH, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8 * WIDTH, CLASSES),
    ).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loader = DataLoader(dataset(), BATCH)

    def forever():
        while True:
            yield from loader

    data = forever()

    def step():
        x, y = (part.to(device()) for part in next(data))
        with mixed():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Constructing)


def clean():
    return build(Recordings)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
