"""Links of a large graph are predicted from a learned vector for each node. A step touches some hundred nodes,
but the lookup makes a dense gradient, zeros for all the other nodes, and Adam then goes through the whole
table and its two moments. The gradient can be sparse, and SparseAdam updates the rows that were touched.
A good finding names the dense gradient or update of the whole table for the few rows of a batch, and
the lookup, the table or the optimizer.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the table of all nodes gets a dense gradient and a full Adam update for a few rows",
    "FIX": "look up with sparse=True and update the table with SparseAdam",
}
NODES, WIDTH = by_device(2_000_000, 120_000), by_device(128, 64)
LINKS, HIDDEN = by_device(4096, 256), by_device(1024, 480)


class LinkNet(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.sparse = sparse
        self.table = nn.Parameter(0.1 * torch.randn(NODES, WIDTH))
        self.judge = nn.Sequential(
            nn.Linear(2 * WIDTH, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, pairs):
        if self.sparse:
            ends = F.embedding(pairs, self.table, sparse=True)
        else:
            ends = F.embedding(pairs, self.table)  # guilty
        return self.judge(ends.flatten(1)).squeeze(1)


def training(sparse):
    torch.manual_seed(0)
    model = LinkNet(sparse).to(device())
    if sparse:
        optimizers = [
            torch.optim.SparseAdam([model.table], lr=1e-3),
            torch.optim.Adam(model.judge.parameters(), lr=1e-3, fused=True),
        ]
    else:
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)]

    def make():
        pairs = torch.randint(NODES, (2 * LINKS, 2), device=device())
        return pairs, (torch.arange(2 * LINKS, device=device()) < LINKS).float()

    batches = in_turn(make)

    def step():
        pairs, linked = next(batches)
        loss = F.binary_cross_entropy_with_logits(model(pairs), linked)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    return step


def faulty():
    return training(sparse=False)


def clean():
    return training(sparse=True)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
