"""A retrieval model learns by classifying, for each query, its document among those of the batch; the logits
are negative squared distances. These are written as the sum of squared differences over a tensor of
queries x documents x features, which is many gigabytes, instead of by one matrix product.
A good finding names the broadcast difference and the line of it, by its time or its memory.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "squared distances of all pairs are summed over a broadcast difference of N x N x features",
    "FIX": "expand the square: |q|^2 + |d|^2 - 2 q d^T, which is one matrix product",
}
BATCH, TIME, VOCAB = by_device(1536, 288), by_device(32, 16), by_device(8192, 128)
WIDTH, LAYERS, FEATURES = by_device(512, 32), by_device(2, 1), by_device(256, 32)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, max(1, WIDTH // 64)) for _ in range(LAYERS)))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, FEATURES)

    def forward(self, ids):
        return self.out(self.norm(self.blocks(self.tokens(ids))).mean(1)).float()


def distances_by_difference(queries, documents):
    apart = queries[:, None, :] - documents[None, :, :]
    return apart.pow(2).sum(-1)  # guilty


def distances_by_product(queries, documents):
    lengths = queries.pow(2).sum(-1)[:, None] + documents.pow(2).sum(-1)[None, :]
    return lengths - 2 * queries @ documents.T


def build(distances):
    model = nn.ModuleDict({"query": Tower(), "document": Tower()}).to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randint(VOCAB, (2, BATCH, TIME), device=device()))
    labels = torch.arange(BATCH, device=device())

    def step():
        query_ids, document_ids = next(data)
        with mixed():
            queries, documents = model["query"](query_ids), model["document"](document_ids)
        loss = F.cross_entropy(-distances(queries, documents), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(distances_by_difference)


def clean():
    return build(distances_by_product)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
