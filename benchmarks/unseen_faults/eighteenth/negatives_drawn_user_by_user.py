"""Two towers, one for listeners and one for songs, and a pairwise loss against songs that were not played,
drawn by popularity. They are drawn with np.random.choice(songs, p=popularity), once for each listener
of the batch: every call checks and adds up the popularity of the whole catalogue before it draws.
The sums can be made once; then one searchsorted draws for the whole batch.
A good finding names the host's drawing of negatives in front of the step, and its line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "negatives are drawn by np.random.choice with probabilities, once per listener of the batch",
    "FIX": "add up the popularity once and draw for the whole batch with searchsorted",
}
SONGS, FACTS = by_device(200_000, 20_000), by_device(64, 24)
SIZE, WRONG = by_device(512, 64), by_device(64, 40)
WIDTH = by_device(256, 96)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.listener = nn.Sequential(nn.Linear(FACTS, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.song = nn.Sequential(
            nn.Linear(FACTS, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )

    def forward(self, listeners, played, wrong):
        heard = self.listener(listeners)
        likes = (heard * self.song(played)).sum(-1, keepdim=True)
        return likes - torch.einsum("bw,bnw->bn", heard, self.song(wrong))


def popularity():
    counts = np.random.default_rng(0).zipf(1.5, SONGS).astype(np.float64)
    return counts / counts.sum()


def training(draw):
    torch.manual_seed(0)
    model = Towers().to(device())
    optimizer = adamw(model)
    songs = torch.randn(SONGS, FACTS, device=device())
    plays = in_turn(
        lambda: (torch.randn(SIZE, FACTS, device=device()), torch.randint(SONGS, (SIZE,), device=device()))
    )

    def step():
        listeners, played = next(plays)
        wrong = torch.from_numpy(draw()).to(device())
        ahead = model(listeners, songs[played], songs[wrong])
        loss = -F.logsigmoid(ahead * WIDTH**-0.5).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    chances = popularity()

    def draw():
        return np.stack([np.random.choice(SONGS, WRONG, p=chances) for _ in range(SIZE)])  # guilty

    return training(draw)


def clean():
    edges = popularity().cumsum()
    random = np.random.default_rng(1)

    def draw():
        return np.minimum(edges.searchsorted(random.random((SIZE, WRONG)), side="right"), SONGS - 1)

    return training(draw)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
