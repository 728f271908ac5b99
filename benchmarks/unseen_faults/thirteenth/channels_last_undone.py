"""A residual network with squeeze-and-excitation is trained in channels-last layout. Each block calls
contiguous() on its output, for a view that averages the pixels: that copies the activations back to
channels-first, and the next convolution copies them to channels-last again; the backward does both
once more. mean over the pixels needs neither the view nor the copy.
A good finding names the change of layout by contiguous() and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "contiguous() in every block turns channels-last activations into channels-first, and the convolutions turn them back",
    "FIX": "drop contiguous() and average with x.mean((2, 3))",
}
BATCH, SIDE, WIDE, NARROW = (
    by_device(128, 8),
    by_device(56, 28),
    by_device(256, 64),
    by_device(64, 16),
)
BLOCKS, CLASSES = by_device(6, 4), 100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(WIDE, NARROW, 1, bias=False), nn.BatchNorm2d(NARROW), nn.ReLU(inplace=True),
            nn.Conv2d(NARROW, NARROW, 3, padding=1, bias=False), nn.BatchNorm2d(NARROW), nn.ReLU(inplace=True),
            nn.Conv2d(NARROW, WIDE, 1, bias=False), nn.BatchNorm2d(WIDE),
        )  # fmt: skip
        self.squeeze, self.excite = nn.Linear(WIDE, WIDE // 8), nn.Linear(WIDE // 8, WIDE)

    def gate(self, means):
        return self.excite(F.relu(self.squeeze(means))).sigmoid()[:, :, None, None]


class Copied(Block):
    def forward(self, x):
        y = self.convs(x).contiguous()  # guilty
        means = y.view(y.shape[0], y.shape[1], -1).mean(2)
        return F.relu(y * self.gate(means) + x)


class Kept(Block):
    def forward(self, x):
        y = self.convs(x)
        means = y.mean((2, 3))
        return F.relu(y * self.gate(means) + x)


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, WIDE, 4, 4, bias=False), nn.BatchNorm2d(WIDE)
        self.blocks = nn.Sequential(*[block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDE, CLASSES)

    def forward(self, images):
        x = F.relu(self.norm(self.stem(images)))
        return self.head(self.blocks(x).mean((2, 3)))


def build(block):
    model = Net(block).to(device(), memory_format=torch.channels_last)
    optimizer = adamw(model)

    def batch():
        images = torch.randn(BATCH, 3, 4 * SIDE, 4 * SIDE, device=device())
        labels = torch.randint(CLASSES, (BATCH,), device=device())
        return images.to(memory_format=torch.channels_last), labels

    data = in_turn(batch, 4)

    def step():
        images, labels = next(data)
        with mixed():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Copied)


def clean():
    return build(Kept)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
