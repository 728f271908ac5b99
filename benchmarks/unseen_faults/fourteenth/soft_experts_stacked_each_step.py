"""A soft mixture of experts predicts the load of a power grid from the readings of many meters. The
experts are modules in a list, as they are easiest to write; to run them as one batched product,
the layer stacks their weights in every forward pass, and backward takes the stack apart again.
The weights can be kept as one parameter with the experts as its first dimension.
A good finding names the weights that are stacked (copied) in every step and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the weights of the experts are stacked into one tensor in every forward pass",
    "FIX": "keep the weights of all experts of a layer in one parameter",
}
BATCH, METERS, READINGS = by_device(64, 2), by_device(128, 64), by_device(96, 48)
WIDTH, HIDDEN, LAYERS = by_device(512, 96), by_device(2048, 256), by_device(4, 2)
EXPERTS, SLOTS, AHEAD = by_device(64, 16), by_device(4, 2), 24


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, False)


class ListOfExperts(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, taken):
        up = torch.stack([expert.up.weight for expert in self.experts])  # guilty
        down = torch.stack([expert.down.weight for expert in self.experts])
        return torch.bmm(F.gelu(torch.bmm(taken, up.mT)), down.mT)


class ExpertsInOne(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.up = nn.Parameter(torch.stack([e.up.weight.detach() for e in experts]))
        self.down = nn.Parameter(torch.stack([e.down.weight.detach() for e in experts]))

    def forward(self, taken):
        return torch.bmm(F.gelu(torch.bmm(taken, self.up.mT)), self.down.mT)


class SoftMixture(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.slots = nn.Linear(WIDTH, EXPERTS * SLOTS, bias=False)
        self.experts = kind(nn.ModuleList(Expert() for _ in range(EXPERTS)))

    def forward(self, x):
        h = self.norm(x)
        scores = self.slots(h)
        taken = scores.softmax(1).mT @ h  # (batch, expert and slot, width)
        taken = taken.view(len(x), EXPERTS, SLOTS, WIDTH).transpose(0, 1).flatten(1, 2)
        given = self.experts(taken).view(EXPERTS, len(x), SLOTS, WIDTH)
        return x + scores.softmax(2) @ given.transpose(0, 1).flatten(1, 2)


class Forecast(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.read = nn.Linear(READINGS, WIDTH)
        self.layers = nn.Sequential(*(SoftMixture(kind) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, AHEAD)

    def forward(self, readings):
        return self.head(self.norm(self.layers(self.read(readings))))


def build(kind):
    model = Forecast(kind).to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, METERS, READINGS, device=device()),
            torch.randn(BATCH, METERS, AHEAD, device=device()),
        )
    )

    def step():
        readings, load = next(data)
        with mixed():
            predicted = model(readings)
        loss = F.mse_loss(predicted.float(), load)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(ListOfExperts)


def clean():
    return build(ExpertsInOne)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
