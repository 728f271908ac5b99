"""The positions of a tagger come from a small network of the continuous position. It is given the
positions repeated for every sentence of the batch, and computes the same rows once per sentence.
A good finding names the network of the positions that runs on repeated rows, and its line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 16,
    "CAUSE": "the network of the positions runs on the same positions once per sentence",
    "FIX": "run it on one row of positions and let the sum broadcast",
}
VOCAB, TAGS, TIME, WIDTH = 2000, 17, by_device(512, 64), by_device(768, 128)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Sequential(nn.Linear(1, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
        how = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, **how) for _ in range(1))
        )
        self.head = nn.Linear(WIDTH, TAGS)


class PerSample(Tagger):
    def forward(self, ids):
        at = torch.linspace(-1, 1, ids.shape[1], device=ids.device)
        at = at.repeat(len(ids), 1).unsqueeze(-1)
        places = self.places(at)  # guilty
        return self.head(self.layers(self.tokens(ids) + places))


class Once(Tagger):
    def forward(self, ids):
        at = torch.linspace(-1, 1, ids.shape[1], device=ids.device)
        places = self.places(at.unsqueeze(-1))
        return self.head(self.layers(self.tokens(ids) + places))


def build(tagger):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randint(VOCAB, (size, TIME), device=device()),
                torch.randint(TAGS, (size, TIME), device=device()),
            )
        )

    def loss(model, batch):
        ids, tags = batch
        with mixed():
            logits = model(ids)
        return F.cross_entropy(logits.float().flatten(0, 1), tags.flatten())

    return steplab.UserModel(tagger(), batches, loss, unit="sentences")


def faulty():
    return build(PerSample)


def clean():
    return build(Once)
