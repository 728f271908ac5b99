"""A recommender of films is trained with a softmax over the catalog. What a user has already seen is no
negative, so it is masked out of the scores. The seen films are kept as a list per user, and the
mask is filled row by row in Python, one small indexed assignment for each user of the batch.
A good finding names the loop over users that fills the mask row by row, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the mask of seen films is filled by a Python loop over the users of the batch",
    "FIX": "keep the seen films as one tensor and scatter all rows at once",
}
BATCH, USERS, FILMS = by_device(2048, 512), by_device(50_000, 2000), by_device(20_000, 1500)
WIDTH, SEEN = by_device(512, 128), by_device(100, 40)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.films = nn.Embedding(USERS, WIDTH), nn.Embedding(FILMS, WIDTH)
        self.taste = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, users):
        return self.taste(self.users(users)) @ self.films.weight.T


def row_by_row(known):
    films_of = known.tolist()

    def fill(mask, users):
        for row, user in enumerate(users.tolist()):
            mask[row, films_of[user]] = True  # guilty

    return fill


def all_at_once(known):
    def fill(mask, users):
        mask.scatter_(1, known[users], True)

    return fill


def build(filler):
    known = torch.randint(FILMS, (USERS, SEEN), device=device())
    fill = filler(known)
    model = Towers().to(device())
    optimizer = adamw(model)

    def make():
        users = torch.randint(USERS, (BATCH,), device=device())
        return users, known[users, torch.randint(SEEN, (BATCH,), device=device())]

    data = in_turn(make)

    def step():
        users, wanted = next(data)
        mask = torch.zeros(BATCH, FILMS, dtype=torch.bool, device=device())
        fill(mask, users)
        mask.scatter_(1, wanted[:, None], False)
        with mixed():
            scores = model(users)
            loss = F.cross_entropy(scores.masked_fill(mask, -1e4), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(row_by_row)


def clean():
    return build(all_at_once)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
