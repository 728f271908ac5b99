"""A recommender learns the next item of a shopping session. Its hit rate is wanted once per epoch, so the
scores of each batch over the whole catalog are kept in a list until the epoch ends, where a count of
the hits so far would do: the memory grows with every step, by as much as the batch's largest tensor.
A good finding names the scores kept from step to step (memory that grows) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the scores of every batch are kept until the end of the epoch",
    "FIX": "count the hits of each batch and keep the count",
}
BATCH, SESSION, ITEMS = by_device(4096, 400), by_device(50, 12), by_device(20_000, 4000)
WIDTH, STEPS, FIRST = by_device(256, 64), 500, 10


class Sessions(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.taste = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, session):
        return self.taste(self.items(session).mean(1)) @ self.items.weight.T


def hits(scores, wanted):
    better = scores > scores.gather(1, wanted[:, None])
    return (better.sum(-1) < FIRST).sum()


class KeptScores:
    def __init__(self):
        self.kept = []

    def add(self, scores, wanted):
        self.kept.append((scores, wanted))  # guilty

    def rate(self):
        found = sum(hits(scores, wanted) for scores, wanted in self.kept)
        self.kept.clear()
        return found / (STEPS * BATCH)


class CountedHits:
    def __init__(self):
        self.found = torch.zeros((), dtype=torch.long, device=device())

    def add(self, scores, wanted):
        self.found += hits(scores, wanted)

    def rate(self):
        rate = self.found / (STEPS * BATCH)
        self.found.zero_()
        return rate


def build(metric):
    metric, curve, count = metric(), [], 0
    model = Sessions().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randint(ITEMS, (BATCH, SESSION), device=device()),
            torch.randint(ITEMS, (BATCH,), device=device()),
        )
    )

    def step():
        nonlocal count
        count += 1
        session, wanted = next(data)
        with mixed():
            scores = model(session)
            loss = F.cross_entropy(scores, wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metric.add(scores.detach(), wanted)
        if count % STEPS == 0:
            curve.append(metric.rate())
        return loss.detach()

    return step


def faulty():
    return build(KeptScores)


def clean():
    return build(CountedHits)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
