"""A robot hand is tracked in camera images: a convolutional network tells a heat map for each joint, and the
maps that it should tell are drawn from the joints' coordinates, a bell around each. They are drawn in two
nested loops, image by image and joint by joint, with half a dozen small operations for each of them,
where one broadcast over all images and joints draws the lot.
A good finding names the many small operations of the drawing and a line of the inner loop.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "target heat maps are drawn in a Python loop over the images and their joints",
    "FIX": "draw all maps at once: broadcast the grid against the coordinates (batch, joints, 1, 1)",
}
BATCH, JOINTS = by_device(32, 8), 21
SIDE, MAP = by_device(256, 96), by_device(64, 24)
WIDTH, LAYERS, SPREAD = by_device(192, 32), by_device(6, 3), 1.5


class HandNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1),
        )
        self.layers = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(LAYERS))
        self.head = nn.Conv2d(WIDTH, JOINTS, 1)

    def forward(self, images):
        x = self.stem(images)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return self.head(x)


def one_by_one(joints, grid):
    maps = torch.zeros(BATCH, JOINTS, MAP, MAP, device=joints.device)
    for image in range(BATCH):
        for joint in range(JOINTS):
            x, y = joints[image, joint]
            distance = (grid[None, :] - x) ** 2 + (grid[:, None] - y) ** 2
            maps[image, joint] = torch.exp(-distance / (2 * SPREAD**2))  # guilty
    return maps


def together(joints, grid):
    x, y = joints[:, :, 0, None, None], joints[:, :, 1, None, None]
    distance = (grid[None, :] - x) ** 2 + (grid[:, None] - y) ** 2
    return torch.exp(-distance / (2 * SPREAD**2))


def make(draw):
    torch.manual_seed(0)
    model = HandNet().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    grid = torch.arange(MAP, device=device(), dtype=torch.float32)

    def batch():
        images = torch.randn(BATCH, 3, SIDE, SIDE, device=device())
        return images, torch.rand(BATCH, JOINTS, 2, device=device()) * MAP

    batches = in_turn(batch, 4)

    def step():
        images, joints = next(batches)
        wanted = draw(joints, grid)
        with mixed():
            loss = F.mse_loss(model(images).float(), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return make(one_by_one)


def clean():
    return make(together)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
