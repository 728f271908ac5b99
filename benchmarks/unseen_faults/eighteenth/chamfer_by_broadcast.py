"""An autoencoder of point clouds is trained with the Chamfer distance: for each point of either cloud the
distance to the nearest one of the other. The distances are taken from the differences of all pairs of
points, so a tensor of cloud x cloud x 3 coordinates is made and kept for the backward pass, and its
gradient is as large again; the distances themselves are a third of either.
A good finding names the memory of the pairwise differences and the line that broadcasts the two clouds.
"""

import steplab
import torch
from torch import nn

from common import adamw, by_device, device, in_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "CAUSE": "the coordinate differences of all pairs of points are made and kept for backward",
    "FIX": "torch.cdist(made, given), which makes only the distances",
    "BATCH": 16,
    "CPU_BATCH": 4,
}
POINTS, WIDTH, CODE = by_device(2048, 640), by_device(512, 64), by_device(512, 128)


def distances_by_difference(made, given):
    difference = made[:, :, None, :] - given[:, None, :, :]  # guilty
    return difference.norm(dim=-1)


def distances_by_cdist(made, given):
    return torch.cdist(made, given)


class CloudCoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(
            nn.Linear(3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CODE)
        )
        self.cloud = nn.Sequential(
            nn.Linear(CODE, 2 * CODE), nn.ReLU(), nn.Linear(2 * CODE, POINTS * 3)
        )  # fmt: skip

    def forward(self, cloud):
        code = self.point(cloud).amax(dim=1)
        return self.cloud(code).view(-1, POINTS, 3)


def clouds(size):
    return in_turn(lambda: torch.randn(size, POINTS, 3, device=device()))


def build(distances):
    def chamfer(model, cloud):
        between = distances(model(cloud), cloud)
        return between.amin(dim=2).mean() + between.amin(dim=1).mean()

    return steplab.UserModel(CloudCoder(), clouds, chamfer, optimizer=adamw)


def faulty():
    return build(distances_by_difference)


def clean():
    return build(distances_by_cdist)
