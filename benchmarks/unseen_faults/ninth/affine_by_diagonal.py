"""ResMLP scales and shifts every channel. Here the scale is a product with torch.diag(alpha), a full
matrix product with a matrix of zeros, and its backward computes the gradient of all the zeros too.
A good finding names the product with a diagonal matrix, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 256,
    "CPU_BATCH": 8,
    "CAUSE": "channels are scaled by a matrix product with a diagonal matrix",
    "FIX": "multiply elementwise by the vector",
}
SIDE, PATCH, CLASSES = by_device(224, 64), by_device(16, 8), 100
WIDTH, LAYERS = by_device(768, 192), by_device(8, 3)
PATCHES = (SIDE // PATCH) ** 2


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))


class ByMatrix(Affine):
    def forward(self, x):
        return x @ torch.diag(self.alpha) + self.beta  # guilty


class ByVector(Affine):
    def forward(self, x):
        return torch.addcmul(self.beta, x, self.alpha)


class Block(nn.Module):
    def __init__(self, affine):
        super().__init__()
        self.pre1, self.post1, self.pre2, self.post2 = (affine() for _ in range(4))
        self.tokens = nn.Linear(PATCHES, PATCHES)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.tokens(self.pre1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.post1(y)
        return x + self.post2(self.down(F.gelu(self.up(self.pre2(x)))))


class ResMLP(nn.Module):
    def __init__(self, affine):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.blocks = nn.Sequential(*(Block(affine) for _ in range(LAYERS)))
        self.norm, self.head = affine(), nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2).contiguous()
        return self.head(self.norm(self.blocks(x).mean(1)))


def build(affine):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 3, SIDE, SIDE, device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        images, labels = batch
        with mixed():
            return F.cross_entropy(model(images), labels)

    return steplab.UserModel(ResMLP(affine), batches, loss, unit="images")


def faulty():
    return build(ByMatrix)


def clean():
    return build(ByVector)
