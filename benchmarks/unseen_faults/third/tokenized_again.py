"""The dataset splits each text into word pieces whenever it is asked for it, so the same texts are
tokenized again in every epoch, by Python and in the training process.
A good finding names the wait for data that is spent in the tokenizer, and the line that calls it.
"""

import random
import re

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from common import Decoder, adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "texts are tokenized in __getitem__, again in every epoch, instead of once",
    "FIX": "tokenize when the dataset is made and keep the ids",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(32, 8),
    by_device(512, 64),
    by_device(768, 128),
    by_device(6, 2),
)
SYLLABLES = [a + b for a in "bcdfghklmnprstvz" for b in "aeiou"]
PIECES = {
    p: i for i, p in enumerate(["[UNK]", *SYLLABLES, *(s + t for s in SYLLABLES for t in "nrst")])
}


def texts(count):
    chance = random.Random(0)
    words = ["".join(chance.choices(SYLLABLES, k=chance.randint(1, 5))) for _ in range(2000)]
    return [" ".join(chance.choices(words, k=12 * CONTEXT)) for _ in range(count)]


def tokenize(text):
    ids = []
    for word in re.findall(r"\w+", text):
        start = 0
        while start < len(word):
            end = len(word)
            while end > start and word[start:end] not in PIECES:
                end -= 1
            ids.append(PIECES.get(word[start:end], 0))
            start = max(end, start + 1)
    return torch.tensor(ids[: CONTEXT + 1])


class Lazy(Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return tokenize(self.texts[index])  # guilty


class Ready(Lazy):
    def __init__(self, texts):
        super().__init__([tokenize(text) for text in texts])

    def __getitem__(self, index):
        return self.texts[index]


def endless(loader):
    while True:
        yield from loader


def build(dataset):
    data = endless(DataLoader(dataset(texts(512)), batch_size=BATCH, shuffle=True))
    model = Decoder(WIDTH, LAYERS, len(PIECES), CONTEXT).to(device())
    optimizer = adamw(model)

    def step():
        ids = next(data).to(device())
        with mixed():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Lazy)


def clean():
    return build(Ready)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
