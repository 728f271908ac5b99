"""A recommender with one large table of embeddings. Own loop."""

import torch
import torch.nn.functional as F
from torch import nn

from common import device, main, pick

FAULT = {
    "NAME": "dense_embedding",
    "CAUSE": "The table's gradient is dense, so the backward fills and the optimizer updates all eight million rows although a batch touches a few percent of them.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "nn.Embedding(..., sparse=True) with SparseAdam for the table, so that only the touched rows are updated.",
    "STYLE": "loop",
}
ROWS, DIM, FIELDS, BATCH = pick(8_000_000, 1000), pick(128, 8), pick(26, 3), pick(16384, 16)
HIDDEN = pick(4096, 16)


def make(dense):
    dev = device()
    table = nn.Embedding(ROWS, DIM, sparse=not dense, device=dev)  # FAULT
    tower = nn.Sequential(
        nn.Linear(FIELDS * DIM, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, 1),
    ).to(dev)
    optimizers = [torch.optim.AdamW(tower.parameters(), lr=1e-3, fused=True)]
    if dense:
        optimizers.append(torch.optim.Adam(table.parameters(), lr=1e-3, fused=True))
    else:
        optimizers.append(torch.optim.SparseAdam(table.parameters(), lr=1e-3))
    clicks = (torch.rand(BATCH, device=dev) < 0.1).float()
    data = torch.randint(ROWS, (4, BATCH, FIELDS), device=dev)
    count = 0

    def step():
        nonlocal count
        ids = data[count % 4]
        count += 1
        with torch.autocast(dev, torch.bfloat16):
            logits = tower(table(ids).flatten(1)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits.float(), clicks)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(faulty=lambda: make(True), clean=lambda: make(False))
