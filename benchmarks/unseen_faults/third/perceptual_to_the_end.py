"""A perceptual loss runs its frozen feature network to the end, although only the features of the
second stage are compared.
A good finding names the stages whose output nobody uses (a forward without a backward), and the
line of the loop that calls them.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32,
    "CPU_BATCH": 16,
    "CAUSE": "the perceptual loss runs all five stages of the frozen feature network and uses the first two",
    "FIX": "cut the feature network off behind the last layer that is used",
}
SIDE, WIDTH, WANTED = by_device(128, 32), by_device(64, 16), (0, 1)


def stage(a, b, pool=True):
    layers = [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*([nn.MaxPool2d(2)] if pool else []), *layers)


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        w = WIDTH
        self.stages = nn.ModuleList(
            [
                stage(3, w, pool=False),
                stage(w, 2 * w),
                stage(2 * w, 4 * w),
                stage(4 * w, 8 * w),
                stage(8 * w, 8 * w),
            ]
        )
        self.requires_grad_(False)


class AllStages(Features):
    def forward(self, x):
        found = []
        for number, run in enumerate(self.stages):
            x = run(x)  # guilty
            if number in WANTED:
                found.append(x)
        return found


class UsedStages(Features):
    def forward(self, x):
        found = []
        for run in self.stages[: max(WANTED) + 1]:
            x = run(x)
            found.append(x)
        return found


class Denoiser(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, 3, 3, padding=1),
        )
        self.features = features()

    def forward(self, x):
        return x + self.net(x)


def build(features):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.rand(size, 3, SIDE, SIDE, device=device()))

    def loss(model, x):
        with mixed():
            y = model(x + 0.1 * torch.sin(50 * x))
            with torch.no_grad():
                wanted = model.features(x)
            parts = [F.l1_loss(a, b) for a, b in zip(model.features(y), wanted, strict=True)]
            return F.mse_loss(y, x) + sum(parts)

    return steplab.UserModel(Denoiser(features), batches, loss, unit="images")


def faulty():
    return build(AllStages)


def clean():
    return build(UsedStages)
