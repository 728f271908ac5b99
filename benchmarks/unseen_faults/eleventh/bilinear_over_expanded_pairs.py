"""A dependency parser: an LSTM and a biaffine score for every pair of words and every label. The
states are expanded to all pairs and given to nn.Bilinear, which multiplies the label's matrix with
the head again for each of its possible dependents.
A good finding names the bilinear layer over all pairs of words.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "nn.Bilinear runs on states expanded to all pairs, repeating each head's product",
    "FIX": "multiply heads with the matrices once and then with all dependents, by einsum",
}
BATCH, TIME, VOCAB, LABELS = by_device(64, 20), by_device(64, 20), by_device(20000, 1500), 4
WIDTH, ARC = by_device(256, 192), by_device(128, 32)


def all_pairs(bilinear, head, dependent):
    shape = (*head.shape[:2], *dependent.shape[1:])
    heads = head.unsqueeze(2).expand(shape)
    dependents = dependent.unsqueeze(1).expand(shape)
    return bilinear(heads, dependents)  # guilty


def by_einsum(bilinear, head, dependent):
    return torch.einsum("bxi,lij,byj->bxyl", head, bilinear.weight, dependent) + bilinear.bias


class Parser(nn.Module):
    def __init__(self, score):
        super().__init__()
        self.score = score
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head, self.dependent = nn.Linear(2 * WIDTH, ARC), nn.Linear(2 * WIDTH, ARC)
        self.bilinear = nn.Bilinear(ARC, ARC, LABELS)

    def forward(self, words):
        h = self.lstm(self.words(words))[0]
        return self.score(self.bilinear, F.gelu(self.head(h)), F.gelu(self.dependent(h)))


def build(score):
    model = Parser(score).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randint(VOCAB, (BATCH, TIME), device=device()),
            torch.randint(LABELS, (BATCH, TIME, TIME), device=device()),
        )
    )

    def step():
        words, labels = next(data)
        with mixed():
            scores = model(words)
        loss = F.cross_entropy(scores.float().flatten(0, 2), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(all_pairs)


def clean():
    return build(by_einsum)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
