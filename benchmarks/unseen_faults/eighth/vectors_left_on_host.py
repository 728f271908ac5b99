"""A classifier uses frozen word vectors. They are a plain tensor of the module, not a buffer, so
moving the model to the GPU leaves them on the host. Somebody repaired the error message: the token
numbers go back to the host, the rows are looked up there and copied to the device in every step.
On a CPU the twins do not differ.
A good finding names the lookup on the host, the wait or the copies, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import Block, by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 16,
    "CAUSE": "the word vectors stayed on the host: tokens are copied back, looked up there, and the rows copied to the device",
    "FIX": "register_buffer, so that the vectors move with the model",
}
WORDS, VECTOR, TIME = by_device(400_000, 5000), 300, by_device(512, 64)
WIDTH, LAYERS, CLASSES = by_device(512, 64), by_device(6, 2), 20


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.keep(torch.randn(WORDS, VECTOR, generator=torch.Generator().manual_seed(1)))
        self.embed = nn.Linear(VECTOR, WIDTH)
        self.positions = nn.Parameter(torch.zeros(TIME, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        x = self.embed(self.look_up(ids)) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class OnHost(Classifier):
    def keep(self, vectors):
        self.vectors = vectors

    def look_up(self, ids):
        return self.vectors[ids.cpu()].to(ids.device)  # guilty


class OnDevice(Classifier):
    def keep(self, vectors):
        self.register_buffer("vectors", vectors)

    def look_up(self, ids):
        return self.vectors[ids]


def build(kind):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randint(WORDS, (size, TIME), device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        ids, labels = batch
        with mixed():
            return F.cross_entropy(model(ids), labels)

    return steplab.UserModel(kind(), batches, loss, unit="sequences")


def faulty():
    return build(OnHost)


def clean():
    return build(OnDevice)
