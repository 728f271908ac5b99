"""Streets are segmented from the frames of a car's video, and the loop keeps a confusion matrix for the mean
IoU in the log. It is counted entry by entry: for each pair of a true and a predicted class all pixels
are compared twice, joined and summed. One bincount gives the same numbers.
A good finding names the comparisons and sums over all pixels, repeated for each pair of classes, and
the line that counts.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the confusion matrix is counted with passes over all pixels for each pair of classes",
    "FIX": "count all pairs at once: bincount(true * classes + predicted)",
}
BATCH, SIDE, CLASSES = by_device(16, 2), by_device(256, 96), by_device(27, 19)
WIDTH, LAYERS = by_device(96, 20), by_device(8, 3)


class StreetNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, stride=2, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(LAYERS))
        self.head = nn.ConvTranspose2d(WIDTH, CLASSES, 2, stride=2)

    def forward(self, frames):
        x = F.relu(self.stem(frames))
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return self.head(x)


def count_pairs(guess, truth):
    table = torch.zeros(CLASSES, CLASSES, dtype=torch.long, device=truth.device)
    for i in range(CLASSES):
        for j in range(CLASSES):
            table[i, j] = ((truth == i) & (guess == j)).sum()  # guilty
    return table


def count_once(guess, truth):
    pair = (truth * CLASSES + guess).flatten()
    return torch.bincount(pair, minlength=CLASSES**2).view(CLASSES, CLASSES)


def training(count):
    torch.manual_seed(0)
    model = StreetNet().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    seen = torch.zeros(CLASSES, CLASSES, dtype=torch.long, device=device())

    def make():
        frames = torch.randn(BATCH, 3, SIDE, SIDE, device=device())
        return frames, torch.randint(CLASSES, (BATCH, SIDE, SIDE), device=device())

    batches = in_turn(make)

    def step():
        frames, truth = next(batches)
        logits = model(frames)
        loss = F.cross_entropy(logits, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            seen.add_(count(logits.argmax(1), truth))
        return loss

    return step


def faulty():
    return training(count_pairs)


def clean():
    return training(count_once)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
