"""Two towers learn to find the passage that answers a question, with the other passages of the batch as
negatives. The table of similarities comes from F.cosine_similarity with two axes broadcast against
each other, which makes tensors of (questions, passages, width) several times over, forward and
backward, where the product of the normalized vectors is one small matrix product.
A good finding names the cosine similarity on (questions, passages, width), and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "all pairs are compared by a broadcast cosine similarity instead of a matrix product",
    "FIX": "normalize both sides once and multiply: F.normalize(q) @ F.normalize(p).T",
}
BATCH, WORDS, VOCAB = by_device(768, 128), by_device(128, 16), by_device(32_768, 2000)
WIDTH, HIDDEN, HEAT = by_device(256, 96), by_device(2048, 384), 0.05


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        x = self.words(ids)
        return self.out((x + self.mix(x)).mean(1)).float()


def cosine_of_pairs(questions, passages):
    return F.cosine_similarity(questions[:, None], passages[None], dim=-1)  # guilty


def cosine_table(questions, passages):
    return F.normalize(questions, dim=-1) @ F.normalize(passages, dim=-1).T


def train(similarity):
    torch.manual_seed(0)
    towers = nn.ModuleDict({"question": Tower(), "passage": Tower()}).to(device())
    updates = adamw(towers)
    answers = torch.arange(BATCH, device=device())

    def pair():
        return (
            torch.randint(VOCAB, (BATCH, WORDS // 4), device=device()),
            torch.randint(VOCAB, (BATCH, WORDS), device=device()),
        )

    stream = in_turn(pair)

    def step():
        questions, passages = next(stream)
        with mixed():
            asked, found = towers["question"](questions), towers["passage"](passages)
        table = similarity(asked, found) / HEAT
        loss = (F.cross_entropy(table, answers) + F.cross_entropy(table.T, answers)) / 2
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss.detach()

    return step


def faulty():
    return train(cosine_of_pairs)


def clean():
    return train(cosine_table)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
