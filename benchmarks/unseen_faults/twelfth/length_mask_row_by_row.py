"""A model of shopping sessions: items of a session are embedded, weighted by attention and pooled
to predict whether something is bought. The mask of valid items is filled in a loop over the rows.
A good finding names the loop over the sessions that writes the mask row by row, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the mask of valid items is filled row by row in a Python loop over all sessions",
    "FIX": "compare torch.arange(ITEMS) with the lengths of all sessions at once",
}
BATCH, ITEMS, CATALOGUE = by_device(4096, 2048), 12, by_device(50000, 2000)
WIDTH = by_device(256, 48)


class Sessions(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(CATALOGUE, WIDTH)
        self.hidden, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def forward(self, items, lengths):
        x = self.items(items)
        scores = self.score(torch.tanh(self.hidden(x))).squeeze(-1)
        scores = scores.masked_fill(~self.valid(items, lengths), float("-inf"))
        pooled = torch.bmm(scores.softmax(-1)[:, None].to(x.dtype), x).squeeze(1)
        return self.head(pooled).squeeze(-1)


class RowByRow(Sessions):
    def valid(self, items, lengths):
        mask = torch.zeros(items.shape, dtype=torch.bool, device=items.device)
        for row, length in enumerate(lengths):
            mask[row, :length] = True  # guilty
        return mask


class AtOnce(Sessions):
    def valid(self, items, lengths):
        return torch.arange(items.shape[1], device=items.device) < lengths[:, None]


def batch():
    items = torch.randint(CATALOGUE, (BATCH, ITEMS), device=device())
    lengths = torch.randint(1, ITEMS + 1, (BATCH,), device=device())
    return items, lengths, torch.randint(2, (BATCH,), device=device()).float()


def training(kind):
    model = kind().to(device())
    optimizer, data = adamw(model), in_turn(batch)

    def step():
        items, lengths, bought = next(data)
        with mixed():
            logits = model(items, lengths)
        loss = F.binary_cross_entropy_with_logits(logits.float(), bought)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(RowByRow)


def clean():
    return training(AtOnce)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
