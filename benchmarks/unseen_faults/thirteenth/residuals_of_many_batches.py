"""A network that forecasts weather maps reports the error over its last twelve batches. To that end it
keeps the residuals of twelve batches as they are, every variable at every grid point in fp32, on the
device. The mean square of each batch, one number, is all that the report needs.
A good finding names the residuals that are kept (the deque) and the line.
"""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the residual maps of the last twelve batches are kept on the device for a rolling error, which needs one number of each",
    "FIX": "append the loss, which is the mean square, instead of the residuals",
}
BATCH, VARIABLES, HEIGHT, WIDE = (
    by_device(16, 7),
    by_device(64, 32),
    by_device(128, 24),
    by_device(256, 48),
)
CHANNELS, LAYERS, KEPT, EVERY = by_device(128, 32), by_device(4, 3), 12, 100


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(VARIABLES, CHANNELS, 3, padding=1)
        self.convs = nn.ModuleList(
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(LAYERS)
        )
        self.last = nn.Conv2d(CHANNELS, VARIABLES, 3, padding=1)

    def forward(self, maps):
        x = self.first(maps)
        for conv in self.convs:
            x = F.relu(conv(x)) + x
        return self.last(x)


def build(whole):
    model = Forecast().to(device(), memory_format=torch.channels_last)
    optimizer = adamw(model)
    recent, reports, count = deque(maxlen=KEPT), [], 0

    def batch():
        maps = torch.randn(2, BATCH, VARIABLES, HEIGHT, WIDE, device=device())
        return tuple(m.contiguous(memory_format=torch.channels_last) for m in maps)

    data = in_turn(batch, 2)

    def step():
        nonlocal count
        maps, target = next(data)
        with mixed():
            residual = model(maps) - target
            loss = residual.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        recent.append(residual.detach() if whole else loss.detach())  # guilty
        if count % EVERY == 0:
            error = sum(r.square().mean() if r.dim() else r for r in recent) / KEPT
            reports.append(error.sqrt())
        return loss.detach()

    return step


def faulty():
    return build(True)


def clean():
    return build(False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
