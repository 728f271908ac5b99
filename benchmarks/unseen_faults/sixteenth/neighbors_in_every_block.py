"""A point transformer segments point clouds: each block attends from each point to its nearest neighbors
in space. Every block searches the neighbors itself, from the same coordinates, so that a block can be
used alone; the coordinates do not change between the blocks, and neither do the neighbors.
A good finding names the neighbor search (distances and topk) repeated in every block with the same
result, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "each block searches the nearest neighbors of the same coordinates again",
    "FIX": "search once before the blocks and pass the indices to them",
    "BATCH": 32,
    "CPU_BATCH": 3,
}
POINTS, NEAREST, CLASSES = by_device(2048, 256), by_device(16, 8), 13
WIDTH, BLOCKS = by_device(128, 32), 4


def search(places):
    with torch.no_grad():
        return torch.cdist(places, places).topk(NEAREST, largest=False, sorted=False).indices


def gather(x, nearest):
    rows = nearest + torch.arange(len(x), device=x.device).view(-1, 1, 1) * x.shape[1]
    return x.flatten(0, 1).index_select(0, rows.flatten()).view(*nearest.shape, -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.kv, self.out = (nn.Linear(WIDTH, n * WIDTH) for n in (1, 2, 1))
        self.place = nn.Linear(3, WIDTH)

    def neighbors(self, places, known):
        return known

    def forward(self, x, places, known):
        nearest = self.neighbors(places, known)
        y = self.norm(x)
        k, v = gather(self.kv(y), nearest).chunk(2, -1)
        offset = self.place(gather(places, nearest) - places[:, :, None])
        weights = ((self.q(y)[:, :, None] - k + offset) / 4).softmax(2)
        return x + F.gelu(self.out((weights * (v + offset)).sum(2)))


class SearchingBlock(Block):
    def neighbors(self, places, known):
        return search(places)  # guilty


class PointNet(nn.Module):
    def __init__(self, block, search_first):
        super().__init__()
        self.search_first = search_first
        self.start, self.end = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, places):
        known = search(places) if self.search_first else None
        x = self.start(places)
        for block in self.blocks:
            x = block(x, places, known)
        return self.end(x)


def loss_of(model, batch):
    places, labels = batch
    with mixed():
        return F.cross_entropy(model(places).flatten(0, 1), labels.flatten())


def batches(size):
    return in_turn(
        lambda: (
            torch.rand(size, POINTS, 3, device=device()),
            torch.randint(CLASSES, (size, POINTS), device=device()),
        )
    )


def build(block, search_first):
    import steplab

    return steplab.UserModel(PointNet(block, search_first), batches, loss_of, optimizer=adamw)


def faulty():
    return build(SearchingBlock, search_first=False)


def clean():
    return build(Block, search_first=True)
