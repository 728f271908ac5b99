"""A click model with an inner-product layer: the embeddings of 20 categorical fields are multiplied pair
by pair, and the 190 products go into an MLP together with the embeddings. The pairs are formed by two
nested Python loops, each with two slices, a product and a sum, which the backward pass undoes one by one.
A good finding names the many small operators of the loop over pairs and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32_768,
    "CPU_BATCH": 512,
    "CAUSE": "the inner products of the fields are computed pair by pair in nested Python loops",
    "FIX": "one batched product of the embeddings with themselves, then the upper triangle of it",
}
FIELDS, KINDS = by_device(20, 16), by_device(2000, 100)
SIZE, HIDDEN = by_device(32, 16), by_device(4096, 384)
PAIRS = FIELDS * (FIELDS - 1) // 2


def products_one_by_one(fields):
    products = []
    for i in range(FIELDS):
        for j in range(i + 1, FIELDS):
            products.append((fields[:, i] * fields[:, j]).sum(-1))  # guilty
    return torch.stack(products, dim=1)


def products_at_once(fields):
    first, second = torch.triu_indices(FIELDS, FIELDS, offset=1, device=fields.device)
    products = torch.bmm(fields, fields.transpose(1, 2)).flatten(1)
    return products.index_select(1, first * FIELDS + second)


class ClickModel(nn.Module):
    def __init__(self, products):
        super().__init__()
        self.products = products
        self.table = nn.Embedding(FIELDS * KINDS, SIZE)
        self.register_buffer("offsets", torch.arange(FIELDS) * KINDS)
        self.tower = nn.Sequential(
            nn.Linear(FIELDS * SIZE + PAIRS, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, ids):
        fields = self.table(ids + self.offsets)
        products = self.products(fields)
        return self.tower(torch.cat([fields.flatten(1), products.to(fields.dtype)], dim=1)).squeeze(
            1
        )


def loss(model, batch):
    ids, clicked = batch
    with mixed():
        return F.binary_cross_entropy_with_logits(model(ids).float(), clicked)


def batches(size):
    def make():
        ids = torch.randint(KINDS, (size, FIELDS), device=device())
        return ids, (torch.rand(size, device=device()) < 0.2).float()

    return in_turn(make)


def faulty():
    return steplab.UserModel(ClickModel(products_one_by_one), batches, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(ClickModel(products_at_once), batches, loss, optimizer=adamw)
