"""A model of characters logs the character error rate of every training batch: the edit distances
to the targets are tables filled cell by cell in Python.
A good finding names the time that the host spends in Python on the metric, and its line.
"""

from itertools import count

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the edit distance of every training sample is computed in pure Python in every step",
    "FIX": "compute the error rate on the validation set, or every few hundred steps",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(64, 8),
    by_device(256, 96),
    by_device(768, 128),
    by_device(8, 2),
)
LETTERS, EVERY = 96, 500


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(before + (x != y), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def error_rate(logits, targets):
    pairs = zip(logits.argmax(-1).tolist(), targets.tolist(), strict=True)
    return sum(edit_distance(said, text) for said, text in pairs) / targets.numel()


def prepare():
    model = Decoder(WIDTH, LAYERS, LETTERS, CONTEXT).to(device())
    texts = in_turn(lambda: torch.randint(LETTERS, (BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), texts


def update(model, optimizer, ids):
    with mixed():
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), logits.detach()


def faulty():
    model, optimizer, texts = prepare()
    log = {}

    def step():
        ids = next(texts)
        loss, logits = update(model, optimizer, ids)
        log["error rate"] = error_rate(logits, ids[:, 1:])  # guilty
        return loss

    return step


def clean():
    model, optimizer, texts = prepare()
    log, number = {}, count(1)

    def step():
        ids = next(texts)
        loss, logits = update(model, optimizer, ids)
        if next(number) % EVERY == 0:
            log["error rate"] = error_rate(logits, ids[:, 1:])
        return loss

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
