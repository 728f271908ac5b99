"""A convolutional network with a LayerNorm over the channels."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "layout_flips",
    "CAUSE": "Activations are kept as NCHW, so every channel-wise LayerNorm copies them to NHWC and back, and the tensor-core convolutions convert the layout once more.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Keep model and images in torch.channels_last: the permutation is then a view, and nothing is copied.",
    "STYLE": "factory",
    "BATCH": 64,
}
SIDE, CHANNELS, BLOCKS = pick(224, 32), pick(256, 8), pick(5, 1)


class Block(nn.Module):
    def __init__(self, copies):
        super().__init__()
        self.copies = copies
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm = nn.LayerNorm(CHANNELS)
        self.up, self.down = (
            nn.Conv2d(CHANNELS, 2 * CHANNELS, 1),
            nn.Conv2d(2 * CHANNELS, CHANNELS, 1),
        )

    def forward(self, x):
        y = self.conv(x).permute(0, 2, 3, 1)
        y = self.norm(y).to(x.dtype).permute(0, 3, 1, 2)
        if self.copies:
            y = y.contiguous()  # FAULT
        return x + self.down(F.gelu(self.up(y)))


class Network(nn.Module):
    def __init__(self, copies):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 4, stride=4)
        self.blocks = nn.Sequential(*[Block(copies) for _ in range(BLOCKS)])
        self.head = nn.Linear(CHANNELS, 1000)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def make(layout):
    def batches(size):
        images = torch.rand(size, 3, SIDE, SIDE, device=device()).contiguous(memory_format=layout)
        labels = torch.randint(1000, (size,), device=device())
        while True:
            yield images, labels

    def loss(model, batch):
        images, labels = batch
        with torch.autocast(images.device.type, torch.bfloat16):
            return F.cross_entropy(model(images.contiguous(memory_format=layout)), labels)

    model = Network(copies=layout is torch.contiguous_format).to(memory_format=layout)
    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    return make(torch.contiguous_format)


def clean():
    return make(torch.channels_last)
