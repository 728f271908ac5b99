"""A vision transformer cuts its patches in two nested Python loops and projects each on its own: a
small matrix product per patch, and as many gradients of the same weight to be added up.
A good finding names the many small products in a Python loop, and the line.
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
    "CPU_BATCH": 6,
    "CAUSE": "patches are cut and projected one by one in nested loops, a tiny matrix product each",
    "FIX": "one strided convolution, or a reshape and one matrix product, for all patches",
}
SIZE, PATCH, CLASSES = by_device(224, 128), by_device(16, 8), by_device(1000, 10)
WIDTH, LAYERS, SIDE = by_device(384, 64), by_device(6, 1), SIZE // PATCH


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.positions = nn.Parameter(torch.randn(SIDE * SIDE, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.blocks(self.embed(images) + self.positions)
        return self.head(self.norm(x).mean(dim=1))


class OneByOne(Classifier):
    def embed(self, images):
        tokens = []
        for i in range(0, SIZE, PATCH):
            for j in range(0, SIZE, PATCH):
                patch = images[:, :, i : i + PATCH, j : j + PATCH].flatten(1)
                tokens.append(self.patch(patch))  # guilty
        return torch.stack(tokens, dim=1)


class AtOnce(Classifier):
    def embed(self, images):
        patches = images.view(len(images), 3, SIDE, PATCH, SIDE, PATCH).permute(0, 2, 4, 1, 3, 5)
        return self.patch(patches.reshape(len(images), SIDE * SIDE, -1))


def build(kind):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, SIZE, SIZE, device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        images, labels = batch
        with mixed():
            return F.cross_entropy(model(images), labels)

    return steplab.UserModel(kind(), batches, loss, unit="images")


def faulty():
    return build(OneByOne)


def clean():
    return build(AtOnce)
