"""The targets of a pose network are a heat map per joint. Each of them is an exponential of all pixels
in numpy, although a Gaussian is the product of one along x and one along y.
A good finding names the step's wait for data, or the exponential on the host, and its line.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the heat map of every joint is an exponential over all pixels in numpy, joint by joint",
    "FIX": "the outer product of two one-dimensional Gaussians",
}
BATCH, SIDE, WIDTH, JOINTS, SIGMA = (
    by_device(64, 8),
    by_device(128, 96),
    by_device(128, 24),
    17,
    2.0,
)
PEOPLE = 64


def full_grid(joints):
    ys, xs = np.mgrid[:SIDE, :SIDE]
    maps = np.zeros((*joints.shape[:2], SIDE, SIDE), np.float32)
    for person, points in enumerate(joints):
        for joint, (x, y) in enumerate(points):
            apart = (xs - x) ** 2 + (ys - y) ** 2
            maps[person, joint] = np.exp(-apart / (2 * SIGMA**2))  # guilty
    return maps


def separable(joints):
    along = np.exp(-((np.arange(SIDE) - joints[..., None]) ** 2) / (2 * SIGMA**2))
    along = along.astype(np.float32)
    return along[:, :, 1, :, None] * along[:, :, 0, None, :]


def batches(render):
    chance = np.random.default_rng(0)
    images = torch.randn(PEOPLE, 3, 2 * SIDE, 2 * SIDE).contiguous(
        memory_format=torch.channels_last
    )
    images = images.to(device())
    while True:
        for begin in range(0, PEOPLE, BATCH):
            maps = render(chance.uniform(0, SIDE, (BATCH, JOINTS, 2)))
            yield images[begin : begin + BATCH], torch.from_numpy(maps).to(device())


def build(render):
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 5, stride=4, padding=2),
        nn.ReLU(),
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 4 * JOINTS, 1),
        nn.PixelShuffle(2),
    ).to(device(), memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = batches(render)

    def step():
        images, maps = next(data)
        with mixed():
            loss = F.mse_loss(model(images), maps)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(full_grid)


def clean():
    return build(separable)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
