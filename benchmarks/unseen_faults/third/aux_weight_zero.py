"""A compiled model still computes its auxiliary reconstruction loss, forward and backward, although
its weight in the sum has been annealed to zero.
A good finding names the decoder whose gradients are all zero, and the line that adds its loss.
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
    "CPU_BATCH": 512,
    "CAUSE": "an auxiliary loss with weight 0.0 is computed and backpropagated in every step",
    "FIX": "skip it when its weight is zero",
}
INPUT, WIDTH = by_device(8192, 512), by_device(4096, 512)


class Model(nn.Module):
    aux_weight = 0.0

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Linear(INPUT, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()
        )
        self.classify = nn.Linear(WIDTH, 10)
        self.decode = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, INPUT))


class Always(Model):
    def forward(self, x, y):
        h = self.encode(x)
        loss = F.cross_entropy(self.classify(h), y)
        return loss + self.aux_weight * F.mse_loss(self.decode(h), x)  # guilty


class IfWanted(Model):
    def forward(self, x, y):
        h = self.encode(x)
        loss = F.cross_entropy(self.classify(h), y)
        if self.aux_weight:
            loss = loss + self.aux_weight * F.mse_loss(self.decode(h), x)
        return loss


def build(kind):
    my_turn()
    model = kind()
    model.compile()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, INPUT, device=device()),
                torch.randint(10, (size,), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return model(*batch)

    def optimizer(model, **how):
        return torch.optim.Adam(model.parameters(), lr=1e-4, **how)

    return steplab.UserModel(model, batches, loss, optimizer=optimizer, unit="samples")


def faulty():
    return build(Always)


def clean():
    return build(IfWanted)
