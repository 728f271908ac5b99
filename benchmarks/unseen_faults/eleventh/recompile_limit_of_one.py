"""A frame-wise audio network with gated Snake activations is compiled and trained on short and on long
excerpts, two shapes per step. The limit of recompilations was set to 1 to quiet the warnings.
A good finding names the limit of recompilations, because of which the long excerpts run uncompiled.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the limit of recompilations is 1, so only the first of two shapes is compiled and the other runs eagerly",
    "FIX": "leave the limit at its default, which allows a compiled version for each of the two shapes",
}
BATCH, SHORT, LONG = by_device(64, 16), by_device(1024, 128), by_device(4096, 640)
WIDTH, LAYERS = by_device(256, 32), 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.alpha = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = self.linear(x)
        snake = y + torch.sin(self.alpha * y).square() / (self.alpha + 1e-6)
        return x + snake * torch.sigmoid(y)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, frames):
        return self.out(self.layers(frames))


def training():
    torch.manual_seed(0)
    model = Denoiser().to(device())
    optimizer = adamw(model)
    model.compile(dynamic=False)
    data = in_turn(
        lambda: [torch.randn(BATCH, time, WIDTH, device=device()) for time in (SHORT, LONG)], 4
    )

    def step():
        loss = 0.0
        for frames in next(data):
            with mixed():
                guess = model(frames)
            loss = loss + F.mse_loss(guess.float(), frames)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    torch._dynamo.config.recompile_limit = 1  # guilty
    return training()


def clean():
    torch._dynamo.config.recompile_limit = 8
    return training()


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
