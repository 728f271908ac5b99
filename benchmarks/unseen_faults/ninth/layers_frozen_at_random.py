"""A random half of the layers is frozen in each step by requires_grad, to save work. The model is
compiled as a whole, and which weights require a gradient is in its guards: each new choice of layers
is compiled anew, and beyond the limit of eight the whole model runs eagerly.
A good finding names the recompilations, or that the model runs uncompiled, and the line that
compiles it or that freezes the layers.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the compiled model is compiled anew for each choice of frozen layers, up to the limit, and then runs eagerly",
    "FIX": "compile the layers one by one: each has a few variants, trained and frozen",
}
BATCH, TIME, WIDTH, INNER = (
    by_device(32, 10),
    by_device(512, 64),
    by_device(4096, 768),
    by_device(256, 16),
)
LAYERS = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.full((WIDTH,), v)) for v in (1.0, 0.1))
        self.mix, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        gate = torch.sigmoid(1.702 * y + self.shift)
        y = y * gate + torch.tanh(y) * (1 - gate)
        return x + self.out(F.silu(self.mix(y)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def prepare(compiled):
    model = Model().to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randn(BATCH, TIME, 16, device=device()))
    run, rng = compiled(model), random.Random(0)

    def step():
        for layer in [model.enter, *model.layers]:
            layer.requires_grad_(rng.random() < 0.5)
        x = next(data)
        with mixed():
            loss = F.mse_loss(run(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def as_a_whole(model):
    return torch.compile(model)  # guilty


def layer_by_layer(model):
    for layer in model.layers:
        layer.compile()
    return model


def faulty():
    return prepare(as_a_whole)


def clean():
    return prepare(layer_by_layer)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
