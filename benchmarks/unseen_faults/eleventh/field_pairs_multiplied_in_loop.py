"""A DeepFM click model with 24 categorical fields. The second-order term of the factorization
machine is added up pair by pair in a Python loop over all pairs of fields, instead of half of the
squared sum less the sum of squares.
A good finding names the loop over the pairs of fields, 276 times a few small operators.
"""

from itertools import combinations

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the products of all pairs of fields are taken one pair after the other in Python",
    "FIX": "use the identity 0.5 * (sum squared - sum of squares)",
}
BATCH, FIELDS, ROWS, DIM = by_device(8192, 512), 24, by_device(20000, 500), by_device(32, 16)
WIDTH = by_device(1024, 352)


def pairs_in_loop(vectors):
    fields = vectors.unbind(1)
    total = 0.0
    for a, b in combinations(range(FIELDS), 2):
        total = total + (fields[a] * fields[b]).sum(-1)  # guilty
    return total


def pairs_by_identity(vectors):
    return 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(-1)


class DeepFM(nn.Module):
    def __init__(self, interact):
        super().__init__()
        self.interact = interact
        self.table = nn.Embedding(FIELDS * ROWS, DIM)
        nn.init.normal_(self.table.weight, std=0.05)
        self.first = nn.Embedding(FIELDS * ROWS, 1)
        self.deep = nn.Sequential(
            nn.Linear(FIELDS * DIM, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, rows):
        vectors = self.table(rows)
        linear = self.first(rows).sum((1, 2))
        return linear + self.interact(vectors) + self.deep(vectors.flatten(1)).squeeze(-1)


def build(interact):
    model = DeepFM(interact).to(device())
    optimizer = adamw(model)
    offsets = torch.arange(FIELDS, device=device()) * ROWS

    def batch():
        rows = torch.randint(ROWS, (BATCH, FIELDS), device=device()) + offsets
        return rows, torch.randint(2, (BATCH,), device=device()).float()

    data = in_turn(batch)

    def step():
        rows, clicked = next(data)
        with mixed():
            logits = model(rows)
        loss = F.binary_cross_entropy_with_logits(logits.float(), clicked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(pairs_in_loop)


def clean():
    return build(pairs_by_identity)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
