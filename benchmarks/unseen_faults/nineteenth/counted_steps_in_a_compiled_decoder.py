"""The decoder of an audio codec is compiled, and anneals the noise that it adds: a Python counter in the module
is raised in every forward pass and gives the noise's size. The compiler takes the counter for a constant,
compiles again for each new value, gives up after some of them and runs the decoder uncompiled for ever.
A good finding names the recompilations (or that the decoder runs uncompiled) and the line with the counter
or the call of the decoder.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a Python counter in the compiled module makes it recompile until the compiler gives up",
    "FIX": "keep the noise's size in a tensor that is updated outside the compiled module",
}
BATCH, TIME, WIDTH, LAYERS = by_device(32, 10), by_device(8192, 2048), by_device(128, 24), 3


class Snake(nn.Module):
    def __init__(self):
        super().__init__()
        self.pitch = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x):
        return x + torch.sin(self.pitch * x).square() / (self.pitch.abs() + 1e-6)


class Decoder(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.counts, self.seen = counts, 0
        self.into, self.out = nn.Linear(16, WIDTH), nn.Conv1d(WIDTH, 1, 1)
        self.snakes = nn.ModuleList(Snake() for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(LAYERS))

    def forward(self, codes, noise, size):
        if self.counts:
            self.seen += 1
            size = 0.1 * 0.999**self.seen  # guilty
        x = self.into(codes).transpose(1, 2)
        for snake, layer in zip(self.snakes, self.layers, strict=True):
            x = x + layer(snake(x + size * noise))
        return torch.tanh(self.out(x)).squeeze(1)


def training(counts):
    torch.manual_seed(0)
    decoder = Decoder(counts).to(device())
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3, fused=True)
    compiled = torch.compile(decoder)
    size = torch.tensor(0.1, device=device())

    def make():
        codes = torch.randn(BATCH, TIME, 16, device=device())
        noise = torch.randn(BATCH, WIDTH, TIME, device=device())
        return codes, noise, torch.randn(BATCH, TIME, device=device())

    batches = in_turn(make, 4)

    def step():
        codes, noise, wave = next(batches)
        size.mul_(0.999)
        loss = F.l1_loss(compiled(codes, noise, size), wave)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def faulty():
    return training(counts=True)


def clean():
    return training(counts=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
