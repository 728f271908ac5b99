"""A retrieval model with two towers encodes the whole catalogue in every step and then picks the
items of the batch from the result.
A good finding names the item tower's work on rows that are not used, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the item tower encodes the whole catalogue although the batch needs only a fraction of it",
    "FIX": "pick the items of the batch before the tower",
}
BATCH, ITEMS, FEATURES = by_device(2048, 384), by_device(100_000, 1500), 64
WIDTH, OUT = by_device(1024, 320), by_device(256, 64)


def tower():
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, OUT),
    )


def prepare():
    model = nn.ModuleDict({"query": tower(), "item": tower()}).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    catalogue = torch.randn(ITEMS, FEATURES, device=device())
    batches = in_turn(
        lambda: (
            torch.randn(BATCH, FEATURES, device=device()),
            torch.randperm(ITEMS)[:BATCH].to(device()),
        )
    )
    return model, optimizer, catalogue, batches


def update(model, optimizer, encode, queries, items):
    with mixed():
        queries, keys = (
            F.normalize(model["query"](queries), dim=1),
            F.normalize(encode(items), dim=1),
        )
        loss = F.cross_entropy(20 * queries @ keys.T, torch.arange(BATCH, device=items.device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, catalogue, batches = prepare()

    def encode(items):
        return model["item"](catalogue).index_select(0, items)  # guilty

    return lambda: update(model, optimizer, encode, *next(batches))


def clean():
    model, optimizer, catalogue, batches = prepare()

    def encode(items):
        return model["item"](catalogue.index_select(0, items))

    return lambda: update(model, optimizer, encode, *next(batches))


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
