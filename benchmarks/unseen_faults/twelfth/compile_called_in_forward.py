"""A normalizing flow for tables: coupling layers whose affine map is compiled. The call of
torch.compile stands in the forward of the layer, so it is made anew for every layer and step.
A good finding names torch.compile being called inside the step, and the line.
"""

import torch
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "torch.compile is called in the forward of each coupling layer, in every step",
    "FIX": "compile the function once, outside of the forward",
}
BATCH, COLUMNS, WIDTH, LAYERS = by_device(4096, 1024), 32, by_device(256, 96), 20


def affine(moved, scale, shift):
    scale = 2 * torch.tanh(scale / 2)
    return moved * torch.exp(scale) + shift, scale.sum(-1)


compiled_affine = torch.compile(affine)


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(COLUMNS // 2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, COLUMNS)
        )
        nn.init.normal_(self.net[-1].weight, std=0.01)

    def forward(self, x):
        fixed, moved = x.chunk(2, -1)
        scale, shift = self.net(fixed).float().chunk(2, -1)
        moved, volume = compiled_affine(moved, scale, shift)
        return torch.cat([moved, fixed], -1), volume


class CouplingCompiledInside(Coupling):
    def forward(self, x):
        fixed, moved = x.chunk(2, -1)
        scale, shift = self.net(fixed).float().chunk(2, -1)
        transform = torch.compile(affine)  # guilty
        moved, volume = transform(moved, scale, shift)
        return torch.cat([moved, fixed], -1), volume


def training(kind):
    layers = nn.ModuleList(kind() for _ in range(LAYERS)).to(device())
    optimizer = adamw(layers)
    data = in_turn(lambda: torch.randn(BATCH, COLUMNS, device=device()))

    def step():
        x, volume = next(data), 0
        with mixed():
            for layer in layers:
                x, more = layer(x)
                volume = volume + more
        loss = (x.square().sum(-1) / 2 - volume).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(CouplingCompiledInside)


def clean():
    return training(Coupling)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
