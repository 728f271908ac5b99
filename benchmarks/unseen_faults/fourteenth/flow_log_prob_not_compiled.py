"""A normalizing flow estimates the density of tabular data. The script compiles the model, `flow =
torch.compile(flow)`, and then trains with `flow.log_prob(rows)`. A compiled module compiles its
`forward`; any other method is passed on to the module underneath and runs eagerly, without a
warning. So nothing of the step is compiled, though it looks as if it were.
A good finding says that the model was wrapped by torch.compile but the call runs eagerly, and
names the line of the call (or the many small operators of the couplings).
"""

import math

import torch
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the loss calls the method log_prob of a compiled module, which bypasses the compilation and runs eagerly",
    "FIX": "compile what is called: call the compiled module itself (forward), or torch.compile(flow.log_prob)",
}
ROWS, COLUMNS = by_device(131_072, 4096), 16
WIDTH, COUPLINGS = by_device(128, 24), by_device(8, 4)


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        half = COLUMNS // 2
        self.net = nn.Sequential(
            nn.Linear(half, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, 3 * half),
        )

    def forward(self, x):
        kept, moved = x.chunk(2, dim=-1)
        scale, shift, bend = self.net(kept).chunk(3, dim=-1)
        scale = 2 * torch.tanh(scale / 2)
        moved = moved * scale.exp() + shift
        curve = torch.sigmoid(bend) * 0.9
        slope = 1 + curve * torch.cos(moved)
        moved = moved + curve * torch.sin(moved)
        return torch.cat([moved, kept], dim=-1), (scale + slope.log()).sum(-1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.couplings = nn.ModuleList(Coupling() for _ in range(COUPLINGS))

    def log_prob(self, rows):
        z, volume = rows, 0
        for coupling in self.couplings:
            z, change = coupling(z)
            volume = volume + change
        return volume - 0.5 * (z.square() + math.log(2 * math.pi)).sum(-1)

    def forward(self, rows):
        return self.log_prob(rows)


def build(by_method):
    flow = Flow().to(device())
    optimizer = adamw(flow)
    flow = torch.compile(flow)
    data = in_turn(lambda: torch.randn(ROWS, COLUMNS, device=device()))

    def step():
        rows = next(data)
        if by_method:
            loss = -flow.log_prob(rows).mean()  # guilty
        else:
            loss = -flow(rows).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(by_method=True)


def clean():
    return build(by_method=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
