"""A recommender of songs is trained with a softmax over its catalogue, and the training curve shows the
hit rate among the first ten beside the loss. The metric sorts all songs for every listener and
keeps the first ten columns; the best ten can be had without putting the other thousands in order.
A good finding names the full sort of the scores for the hit rate and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the hit rate sorts the scores of the whole catalogue to read its first ten",
    "FIX": "take the ten by scores.topk(10)",
}
BATCH, HISTORY, SONGS = by_device(1024, 80), by_device(100, 32), by_device(60_000, 4000)
WIDTH, LAYERS, FIRST = by_device(256, 64), 2, 10


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.songs = nn.Embedding(SONGS, WIDTH)
        self.history = nn.GRU(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.taste = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, heard):
        _, last = self.history(self.songs(heard))
        return self.taste(last[-1]) @ self.songs.weight.T


def first_of_all(scores):
    return scores.argsort(dim=-1, descending=True)[:, :FIRST]  # guilty


def first_alone(scores):
    return scores.topk(FIRST).indices


def build(best):
    model = Listener().to(device())
    optimizer = adamw(model)
    hits = torch.zeros((), device=device())
    data = in_turn(
        lambda: (
            torch.randint(SONGS, (BATCH, HISTORY), device=device()),
            torch.randint(SONGS, (BATCH,), device=device()),
        )
    )

    def step():
        heard, wanted = next(data)
        with mixed():
            scores = model(heard)
            loss = F.cross_entropy(scores, wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            hits.add_((best(scores) == wanted[:, None]).sum())
        return loss.detach()

    return step


def faulty():
    return build(first_of_all)


def clean():
    return build(first_alone)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
