"""A small detector predicts objectness and boxes on a grid. Its activation, Mish, is spelled out as
x * tanh(log(1 + exp(x))), as in many repositories, and each of its parts is kept for the backward.
A good finding names the activation whose intermediate results are all kept for the backward, and
the line that spells it out.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "Mish is spelled out in four operators, each of which keeps a tensor for the backward",
    "FIX": "use nn.Mish, which keeps only its input",
}
BATCH, SIDE, ANCHORS = by_device(32, 4), by_device(256, 64), 3
WIDTH = by_device(64, 12)


class MishByHand(nn.Module):
    def forward(self, x):
        return x * torch.tanh(torch.log(1 + torch.exp(x)))  # guilty


def detector(activation):
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1),
        activation(),
        nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
        activation(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
        activation(),
        nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1),
        activation(),
        nn.Conv2d(2 * WIDTH, 4 * WIDTH, 3, stride=2, padding=1),
        activation(),
        nn.Conv2d(4 * WIDTH, 5 * ANCHORS, 1),
    )


def batch():
    images = torch.randn(BATCH, 3, SIDE, SIDE, device=device())
    grid = (BATCH, ANCHORS, 5, SIDE // 4, SIDE // 4)
    goal = torch.randn(grid, device=device())
    goal[:, :, 0] = (goal[:, :, 0] > 1.5).float()
    return images, goal


def training(activation):
    model = detector(activation).to(device())
    optimizer, data = adamw(model), in_turn(batch)

    def step():
        images, goal = next(data)
        with mixed():
            out = model(images)
        out = out.float().view_as(goal)
        loss = F.binary_cross_entropy_with_logits(out[:, :, 0], goal[:, :, 0])
        loss = loss + F.smooth_l1_loss(out[:, :, 1:], goal[:, :, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(MishByHand)


def clean():
    return training(nn.Mish)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
