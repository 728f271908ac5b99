"""A DeepONet learns how a source term determines the solution of an equation: a branch net reads the source
at its sensors, a trunk net reads a place, and the product of their codes is the solution there. As in
the triples of the first publications, each source is repeated for every place where its solution is
known, and so the branch net computes the same code over and over, once for each place.
A good finding names the branch net's work on copies of the same rows and the line that repeats or calls.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the branch net runs on each source once for every place at which it is asked",
    "FIX": "run the branch net once for a source and multiply its code with those of all places",
    "BATCH": 64,
    "CPU_BATCH": 8,
}
SENSORS, PLACES = by_device(256, 64), by_device(1024, 128)
WIDTH, LAYERS = by_device(512, 224), 4


def mlp(inside):
    layers = [nn.Linear(inside, WIDTH)]
    for _ in range(LAYERS - 1):
        layers += [nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers)


class DeepONet(nn.Module):
    def __init__(self, repeated):
        super().__init__()
        self.repeated = repeated
        self.branch, self.trunk = mlp(SENSORS), mlp(2)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, source, place):
        where = self.trunk(place)
        if self.repeated:
            what = self.branch(source[:, None].repeat(1, place.shape[1], 1))  # guilty
            return (what * where).sum(-1) * WIDTH**-0.5 + self.bias
        what = self.branch(source)
        return torch.einsum("bw,bpw->bp", what, where) * WIDTH**-0.5 + self.bias


def batches(size):
    def make():
        source = torch.randn(size, SENSORS, device=device())
        place = torch.rand(size, PLACES, 2, device=device())
        return source, place, torch.randn(size, PLACES, device=device())

    return in_turn(make)


def loss(model, batch):
    source, place, solution = batch
    with mixed():
        return F.mse_loss(model(source, place).float(), solution)


def faulty():
    return steplab.UserModel(DeepONet(repeated=True), batches, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(DeepONet(repeated=False), batches, loss, optimizer=adamw)
