"""The convolutions of a super-resolution network were ported from TensorFlow: their inputs are
padded by F.pad and the convolutions themselves have no padding. Every pad fills a new tensor and
copies the activations into it, and the backward copies the gradients out again. padding=1 costs
nothing.
A good finding names the padding copies (pad, fill) and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "F.pad copies the activations before each convolution, which could pad by itself",
    "FIX": "nn.Conv2d(..., padding=1)",
}
BATCH, SIDE, WIDTH, BLOCKS = (
    by_device(192, 8),
    by_device(96, 48),
    by_device(64, 32),
    by_device(7, 3),
)
SCALE = 2


class ByHand(nn.Conv2d):
    def __init__(self, before, after):
        super().__init__(before, after, 3)

    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1)))  # guilty


class Built(nn.Conv2d):
    def __init__(self, before, after):
        super().__init__(before, after, 3, padding=1)


class Block(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv1, self.conv2 = conv(WIDTH, WIDTH), conv(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(x), inplace=True))


def network(conv):
    return nn.Sequential(
        conv(3, WIDTH),
        *[Block(conv) for _ in range(BLOCKS)],
        conv(WIDTH, 3 * SCALE**2),
        nn.PixelShuffle(SCALE),
    ).to(device(), memory_format=torch.channels_last)


def build(conv):
    model = network(conv)
    optimizer = adamw(model)

    def batch():
        large = torch.rand(BATCH, 3, SCALE * SIDE, SCALE * SIDE, device=device())
        small = F.avg_pool2d(large, SCALE)
        return small.to(memory_format=torch.channels_last), large

    data = in_turn(batch, 4)

    def step():
        small, large = next(data)
        with mixed():
            made = model(small)
        loss = F.l1_loss(made.float(), large)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(ByHand)


def clean():
    return build(Built)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
