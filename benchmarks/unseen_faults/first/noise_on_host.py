"""A denoiser in the manner of diffusion models."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "noise_on_host",
    "CAUSE": "The noise of every training step is drawn by the CPU's random generator and copied to the GPU, instead of being drawn on the GPU.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "torch.randn_like(images), which draws on the device of the images.",
    "STYLE": "factory",
    "BATCH": 64,
}
SIDE, CHANNELS, BLOCKS = pick(128, 16), pick(128, 8), pick(5, 1)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        y = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(y)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*[Residual(CHANNELS) for _ in range(BLOCKS)])
        self.outward = nn.ConvTranspose2d(CHANNELS, 3, 2, stride=2)

    def forward(self, noisy):
        return self.outward(self.blocks(self.inward(noisy)))


def batches(size):
    ready = [
        torch.rand(size, 3, SIDE, SIDE, device=device()).to(memory_format=torch.channels_last)
        for _ in range(4)
    ]
    while True:
        yield from ready


def make(on_host):
    def loss(model, images):
        if on_host:
            noise = torch.randn(images.shape).to(images.device)  # FAULT
        else:
            noise = torch.randn_like(images)
        level = torch.rand(images.shape[0], 1, 1, 1, device=images.device)
        noisy = (1 - level) * images + level * noise
        with torch.autocast(images.device.type, torch.bfloat16):
            predicted = model(noisy)
        return F.mse_loss(predicted.float(), noise)

    model = Denoiser().to(memory_format=torch.channels_last)
    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    return make(on_host=True)


def clean():
    return make(on_host=False)
