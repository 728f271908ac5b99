"""Texts of different lengths, each of which counts the same in the loss."""

import random

import steplab
import torch
import torch.nn.functional as F

from common import Decoder, adamw, device, my_turn, pick

FAULT = {
    "NAME": "loss_per_sample",
    "CAUSE": "The loss is a Python loop over the samples of the batch; the backward of every slice of the logits fills a zero tensor of the size of all logits and adds it to the others.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "One cross-entropy with reduction none over all positions, then a weighted sum with the weights 1 / length.",
    "STYLE": "factory",
    "BATCH": 16,
    "WHY": "Each of the 16 slices logits[i, :n] has a backward that writes and adds a gradient as large as the whole logits; one masked cross-entropy makes a single one.",
    "GAIN_MS": None,
}
CONTEXT, VOCAB = pick(768, 16), pick(16384, 64)


def batches(size):
    pick_length, ready = random.Random(1), []
    for _ in range(8):
        ids = torch.randint(VOCAB, (size, CONTEXT + 1), device=device())
        lengths = [pick_length.randint(CONTEXT * 3 // 4, CONTEXT) for _ in range(size)]
        shares = torch.zeros(size, CONTEXT)
        for i, n in enumerate(lengths):
            shares[i, :n] = 1 / (n * size)
        ready.append((ids, lengths, shares.to(device())))
    while True:
        yield from ready


def make(in_loop):
    def loss(model, batch):
        ids, lengths, shares = batch
        targets = ids[:, 1:]
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = model(ids[:, :-1])
            if in_loop:
                total = 0
                for i, n in enumerate(lengths):
                    total = total + F.cross_entropy(logits[i, :n], targets[i, :n])  # FAULT
                return total / len(lengths)
            each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            return (each * shares.flatten()).sum()

    torch.manual_seed(0)
    model = Decoder(pick(1024, 32), pick(8, 1), VOCAB, CONTEXT)
    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    return make(in_loop=True)


def clean():
    return make(in_loop=False)
