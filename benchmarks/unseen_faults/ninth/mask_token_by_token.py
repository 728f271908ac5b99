"""The masks of masked language modeling are drawn in __getitem__ token by token: two random numbers
and a few branches of Python for each. Both twins make the same masks from the same seed.
A good finding names the Python work on single tokens in the dataset, and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "tokens are chosen and masked one by one in Python in __getitem__",
    "FIX": "draw the random numbers of the whole text at once and mask with np.where",
}
BATCH, TIME, VOCAB, MASK = by_device(128, 32), by_device(512, 128), by_device(30_000, 1000), 3
SPECIAL = (0, 1, 2, 3)
WIDTH, LAYERS = by_device(768, 32), by_device(8, 1)


class Texts(Dataset):
    def __init__(self):
        self.texts = np.random.default_rng(0).integers(0, VOCAB, (2048, TIME))
        self.rng = np.random.default_rng(1)

    def __len__(self):
        return len(self.texts)


class OneByOne(Texts):
    def __getitem__(self, index):
        ids, labels = self.texts[index].copy(), np.full(TIME, -100)
        for place in range(TIME):
            chance, kind = self.rng.random(2)  # guilty
            if chance < 0.15 and ids[place] not in SPECIAL:
                labels[place] = ids[place]
                if kind < 0.8:
                    ids[place] = MASK
                elif kind < 0.9:
                    ids[place] = int(chance / 0.15 * VOCAB)
        return torch.from_numpy(ids), torch.from_numpy(labels)


class AtOnce(Texts):
    def __getitem__(self, index):
        ids, (chance, kind) = self.texts[index], self.rng.random((TIME, 2)).T
        chosen = (chance < 0.15) & (ids > max(SPECIAL))
        labels = np.where(chosen, ids, -100)
        ids = np.where(chosen & (kind < 0.8), MASK, ids)
        other = (chance / 0.15 * VOCAB).astype(ids.dtype)
        ids = np.where(chosen & (kind >= 0.8) & (kind < 0.9), other, ids)
        return torch.from_numpy(ids), torch.from_numpy(labels)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TIME, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, WIDTH // 32, 2 * WIDTH, dropout=0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, labels):
        h = self.layers(self.tokens(ids) + self.positions.weight)
        rows = (labels.flatten() >= 0).nonzero().squeeze(1)  # the head runs on masked places only
        logits = self.head(h.flatten(0, 1).index_select(0, rows))
        return F.cross_entropy(logits, labels.flatten().index_select(0, rows))


def prepare(kind):
    model = Encoder().to(device())
    loader = DataLoader(kind(), BATCH, drop_last=True, pin_memory=device() == "cuda")
    data = (batch for _ in iter(int, 1) for batch in loader)
    optimizer = adamw(model)

    def step():
        ids, labels = (part.to(device(), non_blocking=True) for part in next(data))
        with mixed():
            loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return prepare(OneByOne)


def clean():
    return prepare(AtOnce)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
