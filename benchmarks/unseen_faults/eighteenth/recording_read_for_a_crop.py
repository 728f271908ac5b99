"""Bird calls are told from crops of one second, cut at random places out of recordings of a minute that lie
on disk as wav files. For each crop the data set reads the whole recording and makes floats of all of its
samples before it cuts out the second it wants, so sixty times as much is read and converted as is used.
A good finding names the host's work on whole recordings before the crop, or the input that the device
waits for, and the line that converts the whole recording or the one that reads it.
"""

import random
import tempfile
import wave

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole recording is read and converted to floats for a crop of one second",
    "FIX": "seek to the crop (setpos) and read and convert only its frames",
}
RATE, SECONDS, FILES = 16_000, 60, 8
BATCH, SPECIES = by_device(64, 8), 30
WIDTH, LAYERS = by_device(256, 96), by_device(6, 4)


def record(folder):
    paths = []
    for index in range(FILES):
        paths.append(f"{folder}/{index}.wav")
        with wave.open(paths[-1], "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            noise = np.random.default_rng(index).normal(0, 3000, RATE * SECONDS)
            file.writeframes(noise.astype(np.int16).tobytes())
    return paths


def crop_of_all(path, start):
    with wave.open(path, "rb") as file:
        frames = file.readframes(file.getnframes())
    samples = np.frombuffer(frames, np.int16).astype(np.float32) / 32768  # guilty
    return samples[start : start + RATE]


def crop_only(path, start):
    with wave.open(path, "rb") as file:
        file.setpos(start)
        frames = file.readframes(RATE)
    return np.frombuffer(frames, np.int16).astype(np.float32) / 32768


class CallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, WIDTH, 64, stride=32)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 9, stride=2, padding=4) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, SPECIES)

    def forward(self, crops):
        x = F.relu(self.stem(crops[:, None]))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return self.head(x.mean(2))


def make(crop):
    torch.manual_seed(0)
    folder = tempfile.TemporaryDirectory()
    paths = record(folder.name)
    draw = random.Random(0)
    model = CallNet().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def load():
        assert folder.name  # it is there as long as the loop is
        picks = [draw.randrange(FILES) for _ in range(BATCH)]
        crops = [crop(paths[pick], draw.randrange(RATE * (SECONDS - 1))) for pick in picks]
        return torch.from_numpy(np.stack(crops)), torch.tensor(picks)

    def step():
        crops, calls = (part.to(device(), non_blocking=True) for part in load())
        with mixed():
            loss = F.cross_entropy(model(crops), calls)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return make(crop_of_all)


def clean():
    return make(crop_only)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
