"""A recommender learns from what people bought: each purchase is ranked above a few items drawn at random
that the person has not bought. These are drawn one by one in Python, with a look into the person's set
after each draw, for every purchase of the batch, while the device waits. A table of who has bought
what, and draws for the whole batch at once with a second draw where one was hit, take no time.
A good finding names the host's time in the drawing of negatives, and the loop or the draw.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "negatives are drawn one by one in Python with a look into a set each",
    "FIX": "draw for the whole batch with torch.randint and draw again where a table says bought",
}
USERS, ITEMS, BOUGHT = by_device(20_000, 1000), by_device(20_000, 2000), 30
BATCH, NEGATIVES = by_device(4096, 1536), 8
WIDTH, HIDDEN = by_device(128, 16), by_device(1024, 56)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.score = nn.Sequential(
            nn.Linear(2 * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()
        )
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, users, items):
        who = self.users(users)[:, None].expand(-1, items.shape[1], -1)
        return self.out(self.score(torch.cat([who, self.items(items)], -1)))[..., 0]


class DrawOneByOne:
    def __init__(self, purchases):
        self.bought = [set(row) for row in purchases.tolist()]

    def __call__(self, users):
        drawn = []
        for user in users.tolist():
            for _ in range(NEGATIVES):
                item = random.randrange(ITEMS)  # guilty
                while item in self.bought[user]:
                    item = random.randrange(ITEMS)
                drawn.append(item)
        return torch.tensor(drawn, device=device()).view(-1, NEGATIVES)


class DrawTogether:
    def __init__(self, purchases):
        self.bought = torch.zeros(USERS, ITEMS, dtype=torch.bool)
        self.bought = self.bought.scatter_(1, purchases, True).to(device())

    def __call__(self, users):
        drawn = torch.randint(ITEMS, (len(users), NEGATIVES), device=device())
        again = torch.randint(ITEMS, (len(users), NEGATIVES), device=device())
        return torch.where(self.bought[users[:, None], drawn], again, drawn)


def train(draw_of):
    torch.manual_seed(0)
    random.seed(0)
    purchases = torch.randint(ITEMS, (USERS, BOUGHT))
    draw, model = draw_of(purchases), Ranker().to(device())
    updates = adamw(model)

    def some():
        users = torch.randint(USERS, (BATCH,))
        items = purchases[users, torch.randint(BOUGHT, (BATCH,))]
        return users.to(device()), items.to(device())

    stream = in_turn(some)

    def step():
        users, bought = next(stream)
        items = torch.cat([bought[:, None], draw(users)], 1)
        with mixed():
            scores = model(users, items).float()
        loss = -F.logsigmoid(scores[:, :1] - scores[:, 1:]).mean()
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss.detach()

    return step


def faulty():
    return train(DrawOneByOne)


def clean():
    return train(DrawTogether)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
