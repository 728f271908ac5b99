"""The text of a fastText-like classifier is the mean of its words' vectors. All vectors are looked up
first, (batch, words, width), and averaged after, so the backward expands the gradient to that size
too; nn.EmbeddingBag adds up the rows as it reads them.
A good finding names the lookup of all vectors before their mean (or EmbeddingBag), and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "vectors of all words are gathered into one tensor and averaged after, instead of being summed while they are read",
    "FIX": "nn.EmbeddingBag with mode mean",
}
BATCH, WORDS = by_device(8192, 1536), by_device(256, 160)
VOCAB, WIDTH, CLASSES = by_device(100_000, 4000), by_device(256, 64), 20


class Lookups(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.hidden, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES)

    def text(self, ids):
        return self.words(ids).mean(1)  # guilty

    def forward(self, ids):
        return self.head(F.relu(self.hidden(self.text(ids))))


class Bags(Lookups):
    def text(self, ids):
        return F.embedding_bag(ids, self.words.weight, mode="mean")


def prepare(kind):
    model = kind().to(device())
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
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return prepare(Lookups)


def clean():
    return prepare(Bags)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
