"""A recommender of songs with two embedding tables and a small tower for users. Every user has 24
drawn songs as negatives, which are looked up and scored in a loop, one column at a time.
A good finding names the repeated lookups in the table of songs, each with a dense gradient of the
whole table, and the line of the loop that does them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "negatives are looked up one column at a time, each with a whole-table gradient",
    "FIX": "look up all negatives in one call and score them with one batched product",
}
BATCH, NEGATIVES, USERS = by_device(8192, 1024), 24, by_device(50000, 3000)
SONGS, WIDTH = by_device(100000, 12000), by_device(128, 64)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.songs = nn.Embedding(USERS, WIDTH), nn.Embedding(SONGS, WIDTH)
        self.tower = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )


class OneByOne(Recommender):
    def forward(self, user, liked, drawn):
        u = self.tower(self.users(user))
        good = (u * self.songs(liked)).sum(-1)
        bad = []
        for n in range(drawn.shape[1]):
            bad.append((u * self.songs(drawn[:, n])).sum(-1))  # guilty
        return good[:, None] - torch.stack(bad, 1)


class AtOnce(Recommender):
    def forward(self, user, liked, drawn):
        u = self.tower(self.users(user))
        songs = self.songs(torch.cat([liked[:, None], drawn], 1))
        scores = torch.bmm(songs, u.to(songs.dtype)[..., None]).squeeze(-1)
        return scores[:, :1] - scores[:, 1:]


def batch():
    user = torch.randint(USERS, (BATCH,), device=device())
    liked = torch.randint(SONGS, (BATCH,), device=device())
    return user, liked, torch.randint(SONGS, (BATCH, NEGATIVES), device=device())


def training(kind):
    model = kind().to(device())
    optimizer, data = adamw(model), in_turn(batch)

    def step():
        with mixed():
            margin = model(*next(data))
        loss = -F.logsigmoid(margin.float()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(OneByOne)


def clean():
    return training(AtOnce)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
