"""The contrastive loss takes the cosine similarity of all pairs of views with F.cosine_similarity
on broadcast inputs, which divides, multiplies and sums tensors of views x views x width, gigabytes
each. Normalized rows and one matrix product give the same.
A good finding names the broadcast similarity (its elementwise work or its memory) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the cosine similarity of all pairs is computed by broadcasting to views x views x width",
    "FIX": "normalize the rows and take one matrix product",
}
VIEWS, SIDE, WIDTH, CODE = by_device(2048, 224), by_device(64, 16), by_device(64, 16), 128
HEAT = 0.2


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

    def forward(self, x):
        y = self.conv2(F.relu(self.norm1(self.conv1(x))))
        return F.relu(self.norm2(y) + self.skip(x))


def network():
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 2, 1),
        Residual(WIDTH, WIDTH, 1),
        Residual(WIDTH, 2 * WIDTH, 2),
        Residual(2 * WIDTH, 4 * WIDTH, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * WIDTH, 4 * WIDTH),
        nn.ReLU(),
        nn.Linear(4 * WIDTH, CODE),
    ).to(device(), memory_format=torch.channels_last)


def by_broadcast(z):
    return F.cosine_similarity(z.unsqueeze(1), z.unsqueeze(0), dim=-1)  # guilty


def by_product(z):
    z = F.normalize(z, dim=-1)
    return z @ z.T


def build(similarity):
    model = network()
    optimizer = adamw(model)
    data = in_turn(
        lambda: torch.randn(VIEWS, 3, SIDE, SIDE, device=device()).to(
            memory_format=torch.channels_last
        ),
        4,
    )
    own = torch.eye(VIEWS, dtype=torch.bool, device=device())
    other = torch.arange(VIEWS, device=device()).roll(VIEWS // 2)

    def step():
        images = next(data)
        with mixed():
            codes = model(images)
        scores = similarity(codes.float()) / HEAT
        loss = F.cross_entropy(scores.masked_fill(own, -1e9), other)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(by_broadcast)


def clean():
    return build(by_product)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
