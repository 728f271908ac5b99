"""A variational autoencoder of audio frames is compiled. The weight of its KL term grows over the first
steps, and the model counts its calls itself, in an attribute that is a Python int: torch.compile makes
a new graph for each value, gives up after eight, and runs the model uncompiled from then on.
A good finding names the recompilation (or the fall back to eager) and the counter's attribute or line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a Python counter of calls in the compiled model makes it recompile, and then run eagerly",
    "FIX": "keep the count in a buffer, a tensor",
}
BATCH, FRAME = by_device(131_072, 3000), by_device(192, 64)
WIDTH, CODE, LAYERS, WARMUP = by_device(512, 64), 32, by_device(4, 3), 10_000


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rate = nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.up(self.norm(x))
        y = y + torch.sin(y * self.rate).square() / (self.rate + 1e-6)
        return x + self.down(y)


def stack(inside, outside):
    layers = (Layer() for _ in range(LAYERS))
    return nn.Sequential(nn.Linear(inside, WIDTH), *layers, nn.Linear(WIDTH, outside))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = stack(FRAME, 2 * CODE), stack(CODE, FRAME)
        self.calls = 0

    def ramp(self):
        self.calls += 1  # guilty
        return min(1.0, self.calls / WARMUP)

    def forward(self, frames, noise):
        mean, spread = self.encoder(frames).float().chunk(2, 1)
        guess = self.decoder(mean + noise * torch.exp(0.5 * spread))
        kl = 0.5 * (mean.square() + spread.exp() - spread - 1).sum(1).mean()
        return F.mse_loss(guess.float(), frames) + self.ramp() * kl


class CountedAutoencoder(Autoencoder):
    def __init__(self):
        super().__init__()
        del self.calls
        self.register_buffer("calls", torch.zeros(()))

    def ramp(self):
        self.calls += 1
        return (self.calls / WARMUP).clamp(max=1.0)


def build(kind):
    model = kind().to(device())
    optimizer = adamw(model)
    compiled = torch.compile(model)
    data = in_turn(lambda: torch.randn(BATCH, FRAME, device=device()))

    def step():
        frames = next(data)
        noise = torch.randn(BATCH, CODE, device=device())
        with mixed():
            loss = compiled(frames, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Autoencoder)


def clean():
    return build(CountedAutoencoder)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
