"""A normalizing flow for collider events was once hunted for NaNs: since then every coupling layer
asks, in an if, whether its scales, shifts and outputs are all finite. Each question goes through the
tensor with several kernels and makes the host wait for the answer. Nobody needs it any more; a look
at the loss every so often would notice.
A good finding names the check for finite values (or its wait) in every layer and the line.
"""

import math

import steplab
import torch
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32768,
    "CPU_BATCH": 3072,
    "CAUSE": "every coupling layer checks three tensors for finite values in an if, so the host waits for the device each time",
    "FIX": "remove the check, or look at the loss once in a while",
}
FEATURES, HIDDEN, LAYERS = by_device(64, 64), by_device(512, 32), by_device(16, 8)


def unchecked(x):
    return x


def checked(x):
    if not torch.isfinite(x).all():  # guilty
        raise FloatingPointError("a layer of the flow made values that are not finite")
    return x


class Coupling(nn.Module):
    def __init__(self, check):
        super().__init__()
        self.check = check
        self.net = nn.Sequential(
            nn.Linear(FEATURES // 2, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN), nn.SiLU(),
            nn.Linear(HIDDEN, FEATURES),
        )  # fmt: skip

    def forward(self, x):
        still, moved = x.chunk(2, -1)
        scale, shift = self.net(still).chunk(2, -1)
        scale, shift = self.check(scale.tanh()), self.check(shift)
        moved = self.check(moved * scale.exp() + shift)
        return torch.cat([moved, still], -1), scale.sum(-1)


class Flow(nn.Module):
    def __init__(self, check):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(check) for _ in range(LAYERS))

    def forward(self, x):
        total = 0
        for layer in self.layers:
            x, volume = layer(x)
            total = total + volume
        return 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1) - total


def build(check):
    my_turn()

    def loss(model, events):
        with mixed():
            return model(events).mean()

    return steplab.UserModel(
        Flow(check),
        lambda size: in_turn(lambda: torch.randn(size, FEATURES, device=device())),
        loss,
        unit="events",
    )


def faulty():
    return build(checked)


def clean():
    return build(unchecked)
