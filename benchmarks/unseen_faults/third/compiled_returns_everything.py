"""A compiled loss also returns all its intermediate tensors for a debug panel that is off, so none
of them can stay inside a fused kernel: each is written to memory in full.
A good finding names the large outputs of the compiled graph that nobody reads, and the line that
calls (or returns) them.
"""

import torch
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the compiled function returns its intermediate tensors, which therefore must be written to memory, and the caller drops them",
    "FIX": "return the loss alone",
}
ROWS, CHANNELS = by_device(16_777_216, 1_048_576), 8


def robust_loss(slope, offset, width, x):
    expected = slope * x + offset
    residual = x.square() - expected
    scaled = residual / width
    weight = 1 / (1 + scaled.square())
    clipped = scaled.clamp(-3, 3)
    penalty = weight * clipped.square()
    loss = penalty.mean() + width.square().mean()
    return loss, {
        "expected": expected,
        "residual": residual,
        "scaled": scaled,
        "weight": weight,
        "clipped": clipped,
        "penalty": penalty,
    }


def loss_only(slope, offset, width, x):
    return robust_loss(slope, offset, width, x)[0]


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope, self.offset = (nn.Parameter(torch.linspace(-1, 1, CHANNELS)) for _ in range(2))
        self.width = nn.Parameter(torch.ones(CHANNELS))

    def forward(self):
        return self.slope, self.offset, self.width


def prepare():
    model = Line().to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    data = in_turn(lambda: torch.randn(ROWS, 1, device=device()), 2)
    return model, optimizer, data


def faulty():
    model, optimizer, data = prepare()
    compiled = torch.compile(robust_loss)
    debug = False

    def step():
        optimizer.zero_grad()
        loss, panel = compiled(*model(), next(data))  # guilty
        if debug:
            print({name: t.mean().item() for name, t in panel.items()})
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def clean():
    model, optimizer, data = prepare()
    compiled = torch.compile(loss_only)

    def step():
        optimizer.zero_grad()
        loss = compiled(*model(), next(data))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
