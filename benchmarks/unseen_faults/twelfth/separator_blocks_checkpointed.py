"""Separation of two speakers by dilated convolutions over a learned basis. Every block is
checkpointed, copied from a larger model, although the activations are a few megabytes.
A good finding names the blocks whose forward is computed again in the backward, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "every block is checkpointed although memory is plentiful, so its forward runs twice",
    "FIX": "call the blocks without checkpoint",
}
BATCH, TIME, HOP = by_device(8, 2), by_device(32000, 3072), 8
WIDTH, WIDE, BLOCKS = by_device(128, 48), by_device(512, 96), 6


class Dilated(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.inside = nn.Conv1d(WIDTH, WIDE, 1)
        self.depth = nn.Conv1d(WIDE, WIDE, 3, padding=dilation, dilation=dilation, groups=WIDE)
        self.outside = nn.Conv1d(WIDE, WIDTH, 1)
        self.norm1, self.norm2 = nn.GroupNorm(1, WIDE), nn.GroupNorm(1, WIDE)

    def forward(self, x):
        y = self.norm1(F.relu(self.inside(x)))
        return x + self.outside(self.norm2(F.relu(self.depth(y))))


class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        self.basis = nn.Conv1d(1, WIDTH, 2 * HOP, HOP, HOP // 2, bias=False)
        self.blocks = nn.ModuleList(Dilated(2**i) for i in range(BLOCKS))
        self.masks = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.back = nn.ConvTranspose1d(WIDTH, 1, 2 * HOP, HOP, HOP // 2, bias=False)

    def separate(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, mixture):
        basis = self.basis(mixture[:, None])
        masks = torch.sigmoid(self.masks(self.separate(basis)))
        parts = (masks.unflatten(1, (2, -1)) * basis[:, None]).flatten(0, 1)
        return self.back(parts).unflatten(0, (-1, 2))[:, :, 0]


class CheckpointedSeparator(Separator):
    def separate(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # guilty
        return x


def training(kind):
    model = kind().to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randn(BATCH, 2, TIME, device=device()))

    def step():
        voices = next(data)
        with mixed():
            guess = model(voices.sum(1)).float()
        loss = F.mse_loss(guess, voices[:, :, : guess.shape[-1]])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(CheckpointedSeparator)


def clean():
    return training(Separator)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
