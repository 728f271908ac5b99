"""TransE keeps the vectors of its entities at length one. After every update the whole table is
normalized, although its gradient is sparse and only the rows of the batch have moved.
A good finding names the pass over the whole table (its norm, division or copy), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all rows of the table of entities are normalized after every update although few of them changed",
    "FIX": "normalize the rows of the batch only",
}
BATCH, WIDTH = by_device(65536, 16384), by_device(256, 64)
ENTITIES, RELATIONS = by_device(4_000_000, 300_000), 200
MARGIN = 1.0


class TransE(nn.Module):
    def __init__(self):
        super().__init__()
        self.entities = nn.Embedding(ENTITIES, WIDTH, sparse=True)
        self.relations = nn.Embedding(RELATIONS, WIDTH, sparse=True)
        with torch.no_grad():
            self.entities.weight.copy_(F.normalize(self.entities.weight, dim=1))

    def forward(self, triples, wrong):
        """Return the margin loss; the columns are head, relation, tail; `wrong` are false tails."""
        head, tail, other = self.entities(torch.stack([triples[0], triples[2], wrong]))
        moved = head + self.relations(triples[1])
        good, bad = (moved - tail).square().sum(-1), (moved - other).square().sum(-1)
        return F.relu(MARGIN + good - bad).mean()


@torch.no_grad()
def normalize_all(table, rows):
    table.copy_(F.normalize(table, dim=1))  # guilty


@torch.no_grad()
def normalize_rows(table, rows):
    table.index_copy_(0, rows, F.normalize(table.index_select(0, rows), dim=1))


def prepare(normalize):
    model = TransE().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def draw():
        head, tail, wrong = torch.randint(ENTITIES, (3, BATCH), device=device())
        relation = torch.randint(RELATIONS, (BATCH,), device=device())
        rows = torch.cat([head, tail, wrong]).unique()
        return torch.stack([head, relation, tail]), wrong, rows

    data = in_turn(draw)

    def step():
        triples, wrong, rows = next(data)
        loss = model(triples, wrong)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        normalize(model.entities.weight, rows)
        return loss.detach()

    return step


def faulty():
    return prepare(normalize_all)


def clean():
    return prepare(normalize_rows)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
