"""A reward model is trained on answers with grades. The settings came from a small card: the batch is
split into 16 micro-batches whose gradients accumulate, although the whole batch takes a few gigabytes.
Each micro-batch is far too small to fill the device, and every weight is read and added to 16 times.
A good finding names the micro-batches (tiny kernels, launches) and the accumulation loop.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the batch is accumulated from 16 tiny micro-batches though it fits into memory at once",
    "FIX": "run the batch as one micro-batch, or as few as memory allows",
}
BATCH, CONTEXT, VOCAB = by_device(64, 16), by_device(256, 24), by_device(16_384, 256)
WIDTH, LAYERS, PIECES = by_device(1024, 128), by_device(4, 3), 16


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
        self.decoder.head = nn.Identity()
        self.grade = nn.Linear(WIDTH, 1)

    def forward(self, ids):
        return self.grade(self.decoder(ids)[:, -1]).squeeze(-1).float()


def accumulate(model, ids, grades):
    total = 0.0
    for part, wanted in zip(ids.chunk(PIECES), grades.chunk(PIECES), strict=False):  # guilty
        with mixed():
            loss = F.mse_loss(model(part), wanted) / PIECES
        loss.backward()
        total = total + loss.detach()
    return total


def at_once(model, ids, grades):
    with mixed():
        loss = F.mse_loss(model(ids), grades)
    loss.backward()
    return loss.detach()


def build(gradients):
    model = RewardModel().to(device())
    optimizer = adamw(model)

    def graded():
        ids = torch.randint(VOCAB, (BATCH, CONTEXT), device=device())
        return ids, torch.randn(BATCH, device=device())

    data = in_turn(graded)

    def step():
        ids, grades = next(data)
        loss = gradients(model, ids, grades)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def faulty():
    return build(accumulate)


def clean():
    return build(at_once)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
