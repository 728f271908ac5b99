"""A recommender logs the NDCG of every training batch, for which the items of each user are ranked
by Python's sorted, user by user.
A good finding names the metric (or the Python work between the operators), and the line that sorts.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the items of every user are ranked by Python's sorted for a metric, in every step",
    "FIX": "count on the device how many items score higher than the target, or measure rarely",
}
BATCH, ITEMS, HISTORY = by_device(512, 128), by_device(2000, 600), 40
WIDTH = by_device(1024, 512)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean")
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.GELU()
        )
        self.head = nn.Linear(WIDTH, ITEMS)

    def forward(self, history):
        return self.head(self.body(self.items(history)))


def ndcg_by_hand(scores, bought):
    total = 0.0
    for row, item in zip(scores.tolist(), bought.tolist(), strict=True):
        ranking = sorted(range(len(row)), key=row.__getitem__, reverse=True)  # guilty
        total += 1 / math.log2(ranking.index(item) + 2)
    return total / len(bought)


def ndcg(scores, bought):
    rank = (scores > scores.gather(1, bought[:, None])).sum(1)
    return (1 / torch.log2(rank + 2.0)).mean()


def build(metric):
    model = Recommender().to(device())
    optimizer, log = adamw(model), {}
    chance = torch.Generator(device()).manual_seed(1)

    def batch():
        drawn = torch.randint(ITEMS, (BATCH, HISTORY + 1), device=device(), generator=chance)
        return drawn[:, 1:], drawn[:, 0]

    data = in_turn(batch)

    def step():
        history, bought = next(data)
        with mixed():
            scores = model(history)
            loss = F.cross_entropy(scores, bought)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log["ndcg"] = metric(scores.detach(), bought)
        return loss.detach()

    return step


def faulty():
    return build(ndcg_by_hand)


def clean():
    return build(ndcg)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
