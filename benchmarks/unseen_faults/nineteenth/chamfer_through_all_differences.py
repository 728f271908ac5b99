"""A robot's gripper camera gives point clouds, which an autoencoder learns to draw again. The Chamfer distance
subtracts every point from every other by broadcasting, so the differences of all pairs in x, y and z, and
their squares, lie in memory (and stay there for the backward pass). The distances alone, by a matrix
product, are a third of one of them.
A good finding names the tensor of all pairs times three coordinates, and the line of the difference.
"""

import torch
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the Chamfer loss keeps the coordinate differences of all pairs of points",
    "FIX": "get the squared distances from a matrix product: |a|^2 + |b|^2 - 2 a b",
}
BATCH, POINTS = by_device(16, 4), by_device(2048, 512)
WIDTH, CODE = by_device(512, 96), by_device(512, 128)


class PointCoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Sequential(
            nn.Linear(3, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, CODE),
        )
        self.draw = nn.Sequential(nn.Linear(CODE, 256), nn.ReLU(), nn.Linear(256, 3 * POINTS))

    def forward(self, cloud):
        code = self.look(cloud).amax(1)
        return self.draw(code).view(-1, POINTS, 3)


def by_differences(a, b):
    apart = a[:, :, None, :] - b[:, None, :, :]  # guilty
    return apart.pow(2).sum(3)


def by_product(a, b):
    far = a.square().sum(2)[:, :, None] + b.square().sum(2)[:, None, :]
    return torch.baddbmm(far, a, b.transpose(1, 2), alpha=-2)


def training(distances):
    torch.manual_seed(0)
    model = PointCoder().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    clouds = in_turn(lambda: torch.randn(BATCH, POINTS, 3, device=device()))

    def step():
        cloud = next(clouds)
        far = distances(model(cloud), cloud)
        loss = far.amin(1).mean() + far.amin(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def faulty():
    return training(by_differences)


def clean():
    return training(by_product)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
