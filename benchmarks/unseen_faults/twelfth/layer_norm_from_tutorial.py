"""A residual network for tables predicts the price of a house. Its LayerNorm is a module of one's
own as in many tutorials: mean, var, sqrt, a difference, a quotient, a product and a sum.
A good finding names the normalization that is spelled out in single operators, and the lines of
its forward.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "LayerNorm is spelled out in seven operators over all rows, in every block",
    "FIX": "use nn.LayerNorm",
}
BATCH, COLUMNS = by_device(16384, 1024), 40
WIDTH, BLOCKS = by_device(512, 96), 6


class TutorialNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(var + 1e-5) + self.shift  # guilty


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


def batch():
    return torch.randn(BATCH, COLUMNS, device=device()), torch.randn(BATCH, device=device())


def training(norm):
    model = nn.Sequential(
        nn.Linear(COLUMNS, WIDTH),
        *[Block(norm) for _ in range(BLOCKS)],
        norm(WIDTH),
        nn.Linear(WIDTH, 1),
    ).to(device())
    optimizer, data = adamw(model), in_turn(batch)

    def step():
        x, price = next(data)
        with mixed():
            guess = model(x)
        loss = F.mse_loss(guess.float().squeeze(-1), price)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(TutorialNorm)


def clean():
    return training(nn.LayerNorm)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
