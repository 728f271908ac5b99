"""A denoiser is trained with the structural similarity as its loss, whose Gaussian window of 11x11
is applied as it stands, although it is the product of a column and a row.
A good finding names the depthwise convolutions of the loss, which take longer than the network, and
the line of the one that blurs.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32,
    "CPU_BATCH": 4,
    "CAUSE": "a separable Gaussian window is applied as a full 11x11 convolution, 121 products per pixel instead of 22",
    "FIX": "convolve with the row, then with the column",
}
SIDE, WIDTH, TAPS = by_device(256, 96), by_device(64, 8), 11


class Similarity(nn.Module):
    def __init__(self):
        super().__init__()
        x = torch.arange(TAPS) - TAPS // 2
        row = torch.exp(-x.square() / (2 * 1.5**2))
        row = row / row.sum()
        self.register_buffer("row", row.view(1, 1, 1, TAPS).repeat(3, 1, 1, 1))
        self.register_buffer("square", torch.outer(row, row).repeat(3, 1, 1, 1))

    def forward(self, a, b):
        mean_a, mean_b = self.blur(a), self.blur(b)
        var_a, var_b = self.blur(a * a) - mean_a**2, self.blur(b * b) - mean_b**2
        both = self.blur(a * b) - mean_a * mean_b
        light = (2 * mean_a * mean_b + 1e-4) / (mean_a**2 + mean_b**2 + 1e-4)
        return (light * (2 * both + 9e-4) / (var_a + var_b + 9e-4)).mean()


class BySquare(Similarity):
    def blur(self, x):
        return F.conv2d(x, self.square, groups=3)  # guilty


class ByRows(Similarity):
    def blur(self, x):
        return F.conv2d(F.conv2d(x, self.row, groups=3), self.row.transpose(2, 3), groups=3)


class Denoiser(nn.Module):
    def __init__(self, similarity):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, 3, 3, padding=1),
        )
        self.similarity = similarity()

    def forward(self, image, noise):
        with mixed():
            restored = image + self.net(image + noise)
        return 1 - self.similarity(restored.float(), image)


def build(similarity):
    my_turn()

    def batches(size):
        def make():
            image = torch.rand(size, 3, SIDE, SIDE, device=device())
            return image, 0.1 * torch.randn_like(image)

        return in_turn(make)

    def loss(model, batch):
        return model(*batch)

    return steplab.UserModel(Denoiser(similarity), batches, loss, unit="images")


def faulty():
    return build(BySquare)


def clean():
    return build(ByRows)
