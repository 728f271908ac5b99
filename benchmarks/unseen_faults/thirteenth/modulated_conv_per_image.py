"""The generator of a GAN scales the weights of every convolution by the style of the image and
normalizes them. The layer does so image by image in Python: a weight and a convolution with a batch
of one for each. To scale the input's channels before one convolution of the whole batch, and its
output's after it, gives the same numbers.
A good finding names the loop over the images (one convolution each) and the line.
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
    "CPU_BATCH": 10,
    "CAUSE": "the modulated convolution runs in a Python loop, with a weight and a convolution for each image",
    "FIX": "scale the input by the style, convolve the batch once, and scale the output by the normalization",
}
SIDE, CHANNELS, LAYERS, STYLE = (
    by_device(64, 16),
    by_device(256, 64),
    by_device(6, 4),
    by_device(512, 64),
)


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHANNELS, CHANNELS, 3, 3) / (CHANNELS * 9) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(CHANNELS))
        self.style = nn.Linear(STYLE, CHANNELS)


class PerImage(Modulated):
    def forward(self, x, w):
        styles = 1 + self.style(w)
        images = []
        for image, style in zip(x.split(1), styles, strict=True):
            weight = self.weight * style[:, None, None]
            weight = weight * (weight.square().sum((1, 2, 3), keepdim=True) + 1e-6).rsqrt()
            images.append(F.conv2d(image, weight, padding=1))  # guilty
        y = torch.cat(images)
        return F.leaky_relu(y + self.bias[:, None, None].to(y.dtype), 0.2)


class Batched(Modulated):
    def forward(self, x, w):
        styles = 1 + self.style(w)
        scale = (F.linear(styles.square(), self.weight.square().sum((2, 3))) + 1e-6).rsqrt()
        y = F.conv2d(x * styles[:, :, None, None], self.weight, padding=1)
        bias, scale = self.bias[:, None, None].to(y.dtype), scale[:, :, None, None].to(y.dtype)
        return F.leaky_relu(torch.addcmul(bias, y, scale), 0.2)


class Generator(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.start = nn.Parameter(torch.randn(CHANNELS, SIDE, SIDE))
        self.map = nn.Sequential(nn.Linear(STYLE, STYLE), nn.ReLU(), nn.Linear(STYLE, STYLE))
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))
        self.rgb = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, noise):
        w = self.map(noise)
        x = self.start.expand(len(w), -1, -1, -1).contiguous(memory_format=torch.channels_last)
        for layer in self.layers:
            x = layer(x, w)
        return self.rgb(x)


def build(layer):
    my_turn()

    def batch(size):
        noise = torch.randn(size, STYLE, device=device())
        return noise, torch.randn(size, 3, SIDE, SIDE, device=device())

    def loss(model, pair):
        with mixed():
            return F.l1_loss(model(pair[0]).float(), pair[1])

    model = Generator(layer).to(memory_format=torch.channels_last)
    return steplab.UserModel(
        model, lambda size: in_turn(lambda: batch(size), 4), loss, unit="images"
    )


def faulty():
    return build(PerImage)


def clean():
    return build(Batched)
