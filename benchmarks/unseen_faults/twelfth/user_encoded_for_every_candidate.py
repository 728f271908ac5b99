"""News recommendation: a GRU reads the user's clicks, and each impression has one clicked article
and four others. The model scores one article at a time, so the same history is read five times.
A good finding names the user encoder that runs again for every candidate, and the line of the loop.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the user encoder reads the same click history once for each of the five candidates",
    "FIX": "encode the user once and score all candidates with one product",
}
BATCH, CLICKS, ARTICLES, CANDIDATES = by_device(1024, 80), by_device(50, 20), 5000, 5
WIDTH = by_device(512, 96)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.articles = nn.Embedding(ARTICLES, WIDTH // 2)
        self.project = nn.Linear(WIDTH // 2, WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def article(self, ids):
        return self.project(self.articles(ids))

    def user(self, clicks):
        _, last = self.reader(self.article(clicks))
        return self.out(last[0])

    def forward(self, clicks, article):
        return (self.user(clicks) * self.article(article)).sum(-1)


def prepare():
    model = Recommender().to(device())
    data = in_turn(
        lambda: (
            torch.randint(ARTICLES, (BATCH, CLICKS), device=device()),
            torch.randint(ARTICLES, (BATCH, CANDIDATES), device=device()),
        )
    )
    clicked = torch.zeros(BATCH, dtype=torch.long, device=device())
    return model, adamw(model), data, clicked


def learn(scores, clicked, optimizer):
    loss = F.cross_entropy(scores.float(), clicked)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data, clicked = prepare()

    def step():
        clicks, candidates = next(data)
        with mixed():
            scores = [model(clicks, one) for one in candidates.unbind(1)]  # guilty
        return learn(torch.stack(scores, 1), clicked, optimizer)

    return step


def clean():
    model, optimizer, data, clicked = prepare()

    def step():
        clicks, candidates = next(data)
        with mixed():
            user, articles = model.user(clicks), model.article(candidates)
            scores = (articles @ user[:, :, None])[:, :, 0]
        return learn(scores, clicked, optimizer)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
