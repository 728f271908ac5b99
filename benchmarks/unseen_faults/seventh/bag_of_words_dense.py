"""Texts are bags of words. Each is written out as a row of counts over the whole vocabulary, nearly
all zeros, and multiplied with the first layer's matrix.
A good finding names the product with rows that are nearly all zeros, or their size, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "bags of words are dense rows of counts over the whole vocabulary, multiplied as such",
    "FIX": "F.embedding_bag with the words' numbers, mode sum",
}
BATCH, WORDS, CLASSES = by_device(1024, 64), 60, 20
VOCAB, WIDTH = by_device(200_000, 180_000), by_device(256, 64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.02)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, CLASSES))


class Dense(Net):
    def forward(self, ids):
        ones = torch.ones(ids.shape, device=ids.device)
        counts = torch.zeros(len(ids), VOCAB, device=ids.device).scatter_add_(1, ids, ones)
        return self.head(counts @ self.words)  # guilty


class Bag(Net):
    def forward(self, ids):
        return self.head(F.embedding_bag(ids, self.words, mode="sum"))


def build(net):
    model = net().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randint(VOCAB, (BATCH, WORDS), device=device()),
            torch.randint(CLASSES, (BATCH,), device=device()),
        )
    )

    def step():
        ids, labels = next(data)
        with mixed():
            loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Dense)


def clean():
    return build(Bag)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
