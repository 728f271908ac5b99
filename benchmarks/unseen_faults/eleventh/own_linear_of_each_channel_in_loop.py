"""A forecast of 48 channels by two linear maps per channel, of the trend and of the rest (DLinear
with its option individual). A Python loop runs the layers of one channel after the other and
writes the results into slices of a tensor of zeros.
A good finding names the loop over the channels with its small products and slice writes.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "each channel's own linear layer runs in a Python loop and is written into a slice",
    "FIX": "keep all matrices in one tensor and use one batched product",
}
BATCH, CHANNELS, PAST, FUTURE = by_device(512, 96), by_device(128, 48), 192, 48


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(PAST, FUTURE) for _ in range(CHANNELS))

    def forward(self, x):
        out = torch.zeros(len(x), CHANNELS, FUTURE, device=x.device, dtype=x.dtype)
        for n, layer in enumerate(self.layers):
            out[:, n] = layer(x[:, n])  # guilty
        return out


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        layers = Loop().layers
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in layers]))
        self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers])[:, None])

    def forward(self, x):
        return torch.baddbmm(self.bias, x.transpose(0, 1), self.weight).transpose(0, 1)


class Forecast(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.trend, self.rest = kind(), kind()

    def forward(self, x):
        smooth = F.avg_pool1d(x, 25, 1, 12, count_include_pad=False)
        return self.trend(smooth) + self.rest(x - smooth)


def build(kind):
    model = Forecast(kind).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, CHANNELS, PAST, device=device()),
            torch.randn(BATCH, CHANNELS, FUTURE, device=device()),
        )
    )

    def step():
        past, future = next(data)
        with mixed():
            forecast = model(past)
        loss = F.mse_loss(forecast.float(), future)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Loop)


def clean():
    return build(Batched)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
