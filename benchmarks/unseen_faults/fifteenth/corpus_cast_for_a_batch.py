"""A small language model is pretrained on one long array of 16-bit token numbers, as in nanoGPT. The
function that cuts windows out of it casts to 64 bits first, since an embedding wants that, and cuts
afterwards: the whole corpus is converted and thrown away again for a handful of windows.
A good finding names the conversion of the whole corpus for every batch and the line.
"""

import numpy as np
import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the whole array of tokens is cast to int64 for every batch, before windows are cut out",
    "FIX": "cut the windows out of the 16-bit array first and cast those",
}
BATCH, CONTEXT, VOCAB = by_device(16, 5), by_device(512, 96), by_device(16_384, 512)
WIDTH, LAYERS = by_device(512, 128), by_device(8, 2)
TOKENS = by_device(80_000_000, 24_000_000)


class Corpus:
    def __init__(self, windows):
        self.rng = np.random.default_rng(0)
        self.tokens = self.rng.integers(VOCAB, size=TOKENS, dtype=np.uint16)
        self.windows = windows

    def batch(self):
        starts = self.rng.integers(len(self.tokens) - CONTEXT, size=BATCH)
        rows = self.windows(self.tokens, starts)
        if device() == "cuda":
            rows = rows.pin_memory()
        return rows.to(device(), non_blocking=True)


def cast_and_cut(tokens, starts):
    data = torch.from_numpy(tokens.astype(np.int64))  # guilty
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts])


def cut_and_cast(tokens, starts):
    places = starts[:, None] + np.arange(CONTEXT + 1)
    return torch.from_numpy(tokens[places].astype(np.int64))


def build(windows):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)
    corpus = Corpus(windows)

    def step():
        rows = corpus.batch()
        with mixed():
            logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(cast_and_cut)


def clean():
    return build(cut_and_cast)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
