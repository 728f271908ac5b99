"""A recommender draws negatives by popularity. The generator of batches calls `rng.choice(items,
size, p=popularity)` for each user of the batch in a Python loop. Each call checks the probabilities
and sums them up anew, over all items. The cumulative sum can be made once; then one call of
`searchsorted` draws the negatives of all users, the very same ones.
A good finding names the sampling on the host (the draws in the generator of batches) and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the negatives of each user are drawn by an own rng.choice with p, which sums up the popularity of all items each time",
    "FIX": "sum up the popularity once and draw the negatives of the whole batch by searchsorted",
}
BATCH, NEGATIVES, SEEN = by_device(1024, 128), by_device(256, 64), by_device(100, 30)
ITEMS, WIDTH = by_device(20_000, 5000), by_device(512, 64)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, seen, candidates):
        user = self.recurrent(self.items(seen))[0][:, -1]
        return (self.items(candidates) @ user.unsqueeze(2)).squeeze(2)


def user_by_user(rng, popularity):
    def draw():
        drawn = [rng.choice(ITEMS, NEGATIVES, p=popularity) for _ in range(BATCH)]  # guilty
        return np.stack(drawn)

    return draw


def whole_batch(rng, popularity):
    summed = popularity.cumsum()
    summed /= summed[-1]

    def draw():
        return summed.searchsorted(rng.random((BATCH, NEGATIVES)), side="right")

    return draw


def batches(history, draw):
    """Yield the items seen by each user, and the next one beside its negatives, for ever."""
    while True:
        for rows in history.split(BATCH):
            negatives = torch.from_numpy(draw())
            candidates = torch.cat([rows[:, -1:], negatives], dim=1)
            yield rows[:, :-1].to(device()), candidates.to(device())


def build(sampler):
    model = Recommender().to(device())
    optimizer = adamw(model)
    popularity = 1 / np.arange(1, ITEMS + 1) ** 0.8
    popularity /= popularity.sum()
    history = torch.randint(ITEMS, (16 * BATCH, SEEN + 1))
    data = batches(history, sampler(np.random.default_rng(7), popularity))
    target = torch.zeros(BATCH, dtype=torch.long, device=device())

    def step():
        seen, candidates = next(data)
        loss = F.cross_entropy(model(seen, candidates), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(user_by_user)


def clean():
    return build(whole_batch)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
