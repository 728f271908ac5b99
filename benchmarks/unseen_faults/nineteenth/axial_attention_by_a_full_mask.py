"""A network sorts microscope images with axial attention: every patch looks along its row in one layer and along
its column in the next. The layers compare all patches of the image with all others and a mask then throws
away what is not in the same row or column, fifteen of sixteen scores. Rows and columns can be the batch.
A good finding names attention over the whole grid of which the mask leaves a small part, and the
line that calls the masked attention.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "attention along rows and columns is computed over the whole grid and masked",
    "FIX": "fold the rows (or the columns) into the batch and attend within each, without a mask",
    "BATCH": 16,
    "CPU_BATCH": 2,
}
GRID, PATCH, KINDS = by_device(48, 20), 4, 12
WIDTH, HEADS, LAYERS = by_device(384, 96), by_device(6, 4), by_device(8, 2)


class AxialLayer(nn.Module):
    def __init__(self, axis, masked):
        super().__init__()
        self.axis, self.masked = axis, masked
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if masked:
            place = torch.arange(GRID * GRID)
            line = place // GRID if axis == 0 else place % GRID
            self.register_buffer("same_line", line[:, None] == line[None, :])

    def masked_attention(self, x):
        b, h, w, c = x.shape
        q, k, v = self.qkv(x).view(b, h * w, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.same_line)  # guilty
        return y.transpose(1, 2).reshape(b, h, w, c)

    def line_attention(self, x):
        if self.axis == 1:
            x = x.transpose(1, 2)
        b, h, w, c = x.shape
        q, k, v = self.qkv(x).view(b * h, w, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h, w, c)
        return y.transpose(1, 2) if self.axis == 1 else y

    def forward(self, x):
        look = self.masked_attention if self.masked else self.line_attention
        x = x + self.proj(look(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CellNet(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn(GRID, GRID, WIDTH))
        self.layers = nn.Sequential(*(AxialLayer(i % 2, masked) for i in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, KINDS)

    def forward(self, images):
        x = self.stem(images).permute(0, 2, 3, 1) + self.places
        return self.head(self.norm(self.layers(x)).mean((1, 2)))


def images(size):
    def batch():
        side = GRID * PATCH
        return torch.randn(size, 1, side, side, device=device()), torch.randint(
            KINDS, (size,), device=device()
        )

    return in_turn(batch)


def loss(model, batch):
    picture, kind = batch
    with mixed():
        return F.cross_entropy(model(picture), kind)


def faulty():
    return steplab.UserModel(CellNet(masked=True), images, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(CellNet(masked=False), images, loss, optimizer=adamw)
