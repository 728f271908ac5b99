"""A sequence model of purchases is trained with a dashboard in mind: histograms of every weight are written
into a log, as the experiment trackers do. The script writes them after every step, though nobody looks
at more than a few hundred of them: all weights go to the host and are sorted into bins by numpy while
the device waits. Once in two hundred steps tells the same and costs nothing.
A good finding names the host's time in the histograms of the weights, and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "histograms of all weights are computed on the host after every step",
    "FIX": "log the histograms once in some hundred steps",
}
BATCH, TIME, ITEMS = by_device(256, 10), by_device(128, 24), by_device(8192, 2000)
WIDTH, LAYERS, BINS = by_device(512, 128), by_device(3, 1), 64


class NextPurchase(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.read = nn.GRU(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.out = nn.Linear(WIDTH, ITEMS)

    def forward(self, bought):
        return self.out(self.read(self.items(bought))[0])


class Dashboard:
    def __init__(self):
        self.rows = {}

    def write(self, model):
        for name, weight in model.named_parameters():
            values = weight.detach().cpu().numpy()
            self.rows[name] = np.histogram(values, bins=BINS)  # guilty


def train(every):
    torch.manual_seed(0)
    model, board, done = NextPurchase().to(device()), Dashboard(), 0
    updates = adamw(model)
    stream = in_turn(lambda: torch.randint(ITEMS, (BATCH, TIME + 1), device=device()))

    def step():
        nonlocal done
        bought = next(stream)
        with mixed():
            scores = model(bought[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(scores, bought[:, 1:].flatten())
        loss.backward()
        updates.step()
        updates.zero_grad()
        if done % every == 0:
            board.write(model)
        done += 1
        return loss.detach()

    return step


def faulty():
    return train(every=1)


def clean():
    return train(every=200)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
