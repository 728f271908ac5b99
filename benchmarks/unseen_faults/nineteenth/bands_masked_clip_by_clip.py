"""Spoken commands are recognized from spectrograms, which SpecAugment covers with bands of zeros, two in time
and two in frequency. The bands are drawn and laid over one clip after the other, in a Python loop with
several tiny operations and four numbers fetched for every clip.
A good finding names the many tiny operations (or the fetched numbers) of the loop over the clips,
and a line of the loop.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the bands of SpecAugment are drawn and zeroed clip by clip in a Python loop",
    "FIX": "draw the bands of all clips at once and compare them with an arange to get one mask",
}
BATCH, TIME, MELS, WORDS = by_device(256, 300), by_device(256, 48), by_device(128, 40), 35
WIDTH, BANDS, WIDEST = by_device(256, 32), 2, 12


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(MELS, WIDTH, 5, stride=2, padding=2)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(x.mean(2))


def cover_one_by_one(clips):
    clips = clips.clone()
    for clip in clips:
        for axis, length in ((0, MELS), (1, TIME)):
            for _ in range(BANDS):
                width = int(torch.randint(WIDEST, (1,), device=clips.device))
                start = int(torch.randint(length - WIDEST, (1,), device=clips.device))
                clip.narrow(axis, start, width).zero_()  # guilty
    return clips


def cover_together(clips):
    kept = torch.ones(len(clips), 1, 1, dtype=torch.bool, device=clips.device)
    for axis, length in ((0, MELS), (1, TIME)):
        width = torch.randint(WIDEST, (len(clips), BANDS, 1), device=clips.device)
        start = torch.randint(length - WIDEST, (len(clips), BANDS, 1), device=clips.device)
        place = torch.arange(length, device=clips.device)
        covered = ((place >= start) & (place < start + width)).any(1)
        kept = kept & ~covered.unsqueeze(2 - axis)
    return clips * kept


def training(cover):
    torch.manual_seed(0)
    model = Listener().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def make():
        clips = torch.randn(BATCH, MELS, TIME, device=device())
        return clips, torch.randint(WORDS, (BATCH,), device=device())

    batches = in_turn(make)

    def step():
        clips, words = next(batches)
        loss = F.cross_entropy(model(cover(clips)), words)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def faulty():
    return training(cover_one_by_one)


def clean():
    return training(cover_together)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
