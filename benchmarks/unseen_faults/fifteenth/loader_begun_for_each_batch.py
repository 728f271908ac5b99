"""A recommender learns from a table of ratings. Its loop counts steps, not epochs, and gets a batch with
`next(iter(loader))`, which is short and works. But each call begins a new epoch: a fresh permutation
of all ratings is drawn and made a list of Python numbers, of which one batch is used.
A good finding names the loader's iterator that is made anew for every batch (or the permutation of
the whole table) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "next(iter(loader)) begins an epoch, with a permutation of all rows, for every batch",
    "FIX": "keep one iterator and begin a new one when it is exhausted",
}
BATCH, RATINGS = by_device(8192, 1280), by_device(4_000_000, 300_000)
USERS, ITEMS = by_device(50_000, 1500), by_device(20_000, 800)
WIDTH, HIDDEN, LAYERS = by_device(128, 48), by_device(2048, 256), 4


class Ratings(Dataset):
    def __init__(self):
        self.users = torch.randint(USERS, (RATINGS,))
        self.items = torch.randint(ITEMS, (RATINGS,))
        self.stars = torch.rand(RATINGS) * 4 + 1

    def __len__(self):
        return len(self.stars)

    def __getitem__(self, rows):
        rows = torch.as_tensor(rows)
        return self.users[rows], self.items[rows], self.stars[rows]


class Collaborative(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        sizes = [2 * WIDTH] + [HIDDEN] * LAYERS
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, users, items):
        x = torch.cat([self.users(users), self.items(items)], -1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x).squeeze(-1)


def epoch_after_epoch(loader):
    while True:
        yield from loader


def build(keep):
    model = Collaborative().to(device())
    optimizer = adamw(model)
    ratings = Ratings()
    sampler = BatchSampler(RandomSampler(ratings), BATCH, drop_last=True)
    on_gpu = device() == "cuda"
    loader = DataLoader(ratings, batch_size=None, sampler=sampler, pin_memory=on_gpu)
    endless = epoch_after_epoch(loader)

    def step():
        if keep:
            batch = next(endless)
        else:
            batch = next(iter(loader))  # guilty
        users, items, stars = (part.to(device(), non_blocking=True) for part in batch)
        with mixed():
            loss = F.mse_loss(model(users, items).float(), stars)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(keep=False)


def clean():
    return build(keep=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
