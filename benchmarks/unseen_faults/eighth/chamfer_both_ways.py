"""The Chamfer distance of two point clouds takes the nearest neighbor in both directions. Each
direction computes the distances of all pairs of points for itself, forward and backward, although
the second matrix is the transpose of the first.
A good finding names the distances that are computed twice (or the second torch.cdist) and the line.
"""

import steplab
import torch
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 64,
    "CPU_BATCH": 8,
    "CAUSE": "the distances of all pairs of points are computed once per direction of the Chamfer loss; the second matrix is the transpose of the first",
    "FIX": "compute the distances once and take the minimum over either dimension",
}
POINTS, WIDTH = by_device(2048, 256), by_device(1024, 128)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(
            nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, WIDTH)
        )
        self.cloud = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 3 * POINTS)
        )

    def forward(self, points):
        code = self.point(points).max(1).values
        return self.cloud(code).unflatten(1, (POINTS, 3))


def chamfer_twice(a, b):
    there = torch.cdist(a, b).min(2).values.mean()
    back = torch.cdist(b, a).min(2).values.mean()  # guilty
    return there + back


def chamfer_once(a, b):
    distance = torch.cdist(a, b)
    return distance.min(2).values.mean() + distance.min(1).values.mean()


def build(chamfer):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, POINTS, 3, device=device()))

    def loss(model, points):
        with mixed():
            made = model(points)
        return chamfer(made.float(), points)

    return steplab.UserModel(AutoEncoder(), batches, loss, unit="clouds")


def faulty():
    return build(chamfer_twice)


def clean():
    return build(chamfer_once)
