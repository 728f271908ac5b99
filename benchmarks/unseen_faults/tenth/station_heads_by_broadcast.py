"""Each of many weather stations has output weights of its own; the head multiplies by broadcasting
to batch x stations x width x hours and sums over the width, instead of batched matrix products.
A good finding names the large product with its sum that a bmm or einsum would do, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the linear heads of the stations are a broadcast product, summed over the width",
    "FIX": "torch.einsum('bsw,swh->bsh', x, weight)",
}
BATCH, STATIONS, PAST = by_device(64, 32), by_device(512, 64), by_device(168, 96)
WIDTH, AHEAD = by_device(128, 64), by_device(48, 32)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(PAST, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.weight = nn.Parameter(torch.randn(STATIONS, WIDTH, AHEAD) * WIDTH**-0.5)
        self.bias = nn.Parameter(torch.zeros(STATIONS, AHEAD))

    def forward(self, x):
        return self.head(self.body(x)) + self.bias


class Broadcast(Forecaster):
    def head(self, x):
        return (x.unsqueeze(-1) * self.weight).sum(dim=2)  # guilty


class Batched(Forecaster):
    def head(self, x):
        return torch.einsum("bsw,swh->bsh", x, self.weight)


def build(kind):
    model = kind().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, STATIONS, PAST, device=device()),
            torch.randn(BATCH, STATIONS, AHEAD, device=device()),
        )
    )

    def step():
        past, ahead = next(data)
        with mixed():
            loss = F.l1_loss(model(past), ahead)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Broadcast)


def clean():
    return build(Batched)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
