"""A recommender of next items reports the NDCG of its training batch every 500 steps. The metric is
computed in every step, though: the scores of all items are sorted for each user, and the order is
sorted again to get ranks. All but one result in 500 are dropped.
A good finding names the sorting of all scores (or the metric) in every step and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the NDCG over all items is computed, with two sorts, in every step although it is reported every 500 steps",
    "FIX": "compute the metric only in the steps that report it",
}
BATCH, TIME, ITEMS = by_device(1024, 40), by_device(96, 32), by_device(20_000, 2_000)
WIDTH, LAYERS, EVERY = by_device(256, 64), by_device(4, 2), 500


class Sessions(nn.Module):
    """Read the session with a causal transformer and score all items after its last click."""

    def __init__(self):
        super().__init__()
        self.items, self.positions = nn.Embedding(ITEMS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.Sequential(*[Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, clicks):
        x = self.blocks(self.items(clicks) + self.positions.weight)
        return F.linear(self.norm(x[:, -1]), self.items.weight)


def ndcg(scores, target):
    order = scores.argsort(1, descending=True)  # guilty
    rank = order.argsort(1).gather(1, target[:, None]).squeeze(1)
    return torch.where(rank < 10, 1 / (rank + 2).log2(), 0).mean()


def build(always):
    model = Sessions().to(device())
    optimizer = adamw(model)
    history, count = [], 0

    def batch():
        clicks = torch.randint(ITEMS, (BATCH, TIME), device=device())
        return clicks, torch.randint(ITEMS, (BATCH,), device=device())

    data = in_turn(batch)

    def step():
        nonlocal count
        clicks, target = next(data)
        with mixed():
            scores = model(clicks)
            loss = F.cross_entropy(scores, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        report = count % EVERY == 0
        if always or report:
            metric = ndcg(scores.detach(), target)
        if report:
            history.append(metric)
        return loss.detach()

    return step


def faulty():
    return build(True)


def clean():
    return build(False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
