"""A recommender for the next purchase, trained with a softmax over the catalogue. For the curve on the
dashboard every step logs the hit rate at ten: it sorts the scores of the whole catalogue for each user
and looks whether the bought article is among the first ten places. A topk of ten is all it takes.
A good finding names the sort of all scores for a metric, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the logged hit rate sorts the scores of the whole catalogue in every step",
    "FIX": "scores.topk(10) instead of the full argsort",
}
USERS, ARTICLES, PAST = by_device(1024, 64), by_device(50_000, 3000), by_device(50, 40)
WIDTH, FIRST = by_device(128, 96), 10


class Shopper(nn.Module):
    def __init__(self):
        super().__init__()
        self.articles = nn.Embedding(ARTICLES, WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, past):
        states, _ = self.reader(self.articles(past))
        return self.out(states[:, -1]) @ self.articles.weight.T


def purchases():
    past = torch.randint(ARTICLES, (USERS, PAST), device=device())
    return past, torch.randint(ARTICLES, (USERS,), device=device())


def sorted_places(scores):
    return scores.argsort(dim=1, descending=True)[:, :FIRST]  # guilty


def best_places(scores):
    return scores.topk(FIRST, dim=1).indices


def training(first_places):
    torch.manual_seed(0)
    model = Shopper().to(device())
    optimizer, batches = adamw(model), in_turn(purchases)
    hits = torch.zeros((), device=device())

    def step():
        past, bought = next(batches)
        scores = model(past)
        loss = F.cross_entropy(scores, bought)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = (first_places(scores.detach()) == bought[:, None]).any(1).float().mean()
        hits.lerp_(found, 0.02)
        return loss.detach()

    return step


def faulty():
    return training(sorted_places)


def clean():
    return training(best_places)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
