"""The queue of negative keys of a contrastive loss is moved on by concatenating the new keys with
the old queue and cutting off its end, which copies the whole queue for a few rows.
A good finding names the copy of the queue, and the line of the concatenation.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the queue of keys is copied as a whole in every step, by torch.cat, to put a few rows at its front",
    "FIX": "a ring: write the new keys over the oldest ones in place",
}
BATCH, KEYS, FEATURES = by_device(512, 32), by_device(1_048_576, 65_536), 128
WIDTH = by_device(2048, 256)


class Shifted:
    def __init__(self):
        self.keys = F.normalize(torch.randn(KEYS, FEATURES, device=device()), dim=1)

    def push(self, new):
        self.keys = torch.cat([new, self.keys])[:KEYS]  # guilty


class Ring(Shifted):
    end = KEYS

    def push(self, new):
        self.keys[self.end - len(new) : self.end] = new
        self.end = (self.end - len(new)) or KEYS


def build(kind):
    encoder = nn.Sequential(nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, FEATURES))
    encoder, queue = encoder.to(device()), kind()
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.03, momentum=0.9, fused=True)
    data = in_turn(lambda: torch.randn(BATCH, 256, device=device()))
    first = torch.zeros(BATCH, dtype=torch.long, device=device())

    def step():
        x = next(data)
        optimizer.zero_grad()
        with mixed():
            query = F.normalize(encoder(x + 0.1), dim=1)
            with torch.no_grad():
                key = F.normalize(encoder(x - 0.1), dim=1)
            positive = (query * key).sum(1, keepdim=True)
            logits = torch.cat([positive, query @ queue.keys.T], dim=1) / 0.2
            loss = F.cross_entropy(logits, first)
        loss.backward()
        optimizer.step()
        queue.push(key.float())
        return loss.detach()

    return step


def faulty():
    return build(Shifted)


def clean():
    return build(Ring)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
