"""A genomics dataset makes the one-hot rows of a DNA sequence in Python, letter by letter, for each
sample that is asked for.
A good finding names the step's wait for its batch, and the line that compares the letters.
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "one-hot rows of DNA are made letter by letter in Python in __getitem__",
    "FIX": "look the bytes of the sequence up in a table of one-hot rows, with numpy",
}
BATCH, LENGTH, READS = by_device(256, 32), by_device(1000, 400), by_device(4096, 512)
WIDTH = by_device(256, 48)
TABLE = np.zeros((256, 4), dtype=np.float32)
TABLE[np.frombuffer(b"ACGT", dtype=np.uint8), range(4)] = 1


class Reads(Dataset):
    def __init__(self):
        chance = random.Random(0)
        self.reads = ["".join(chance.choices("ACGTN", k=LENGTH)) for _ in range(READS)]

    def __len__(self):
        return READS

    def encode(self, read):
        rows = [[float(letter == base) for base in "ACGT"] for letter in read]  # guilty
        return torch.tensor(rows)

    def __getitem__(self, i):
        read = self.reads[i]
        return self.encode(read).T, float("TATA" in read)


class Fast(Reads):
    def encode(self, read):
        return torch.from_numpy(TABLE[np.frombuffer(read.encode(), dtype=np.uint8)])


def forever(loader):
    while True:
        yield from loader


def build(dataset):
    model = nn.Sequential(
        nn.Conv1d(4, WIDTH, 15, padding=7),
        nn.ReLU(),
        nn.MaxPool1d(4),
        nn.Conv1d(WIDTH, WIDTH, 9, padding=4),
        nn.ReLU(),
        nn.AdaptiveMaxPool1d(1),
        nn.Flatten(),
        nn.Linear(WIDTH, 1),
    ).to(device())
    optimizer = adamw(model)
    batches = forever(DataLoader(dataset(), BATCH, drop_last=True))

    def step():
        reads, bound = next(batches)
        reads, bound = reads.to(device()), bound.float().to(device())
        with mixed():
            loss = F.binary_cross_entropy_with_logits(model(reads).squeeze(1), bound)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Reads)


def clean():
    return build(Fast)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
