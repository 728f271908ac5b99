"""Words that stream in are turned into numbers by words.index(word), where words is the list of the
whole vocabulary: it is searched from its beginning for every word of a batch.
A good finding names the wait for the batch, or the time in Python, and the line that looks the
words up or the one that takes the batch.
"""

import random

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the number of every word is searched in the list of the whole vocabulary",
    "FIX": "a dict from word to number",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(32, 8),
    by_device(256, 64),
    by_device(512, 64),
    by_device(6, 2),
)
VOCAB = by_device(20_000, 6000)


def sentences(words, chance):
    while True:
        yield [chance.choices(words, k=CONTEXT + 1) for _ in range(BATCH)]


def by_list(words):
    def encode(texts):
        return torch.tensor([[words.index(word) for word in text] for text in texts])  # guilty

    return encode


def by_dict(words):
    numbers = {word: i for i, word in enumerate(words)}

    def encode(texts):
        return torch.tensor([[numbers[word] for word in text] for text in texts])

    return encode


def build(encoder):
    words, chance = [f"word{i}" for i in range(VOCAB)], random.Random(1)
    encode, texts = encoder(words), sentences(words, chance)
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)

    def step():
        ids = encode(next(texts)).to(device())
        with mixed():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(by_list)


def clean():
    return build(by_dict)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
