"""A network separates the voices of four speakers, whose order is free, so the loss takes the best of the
24 permutations. For each permutation it computes the signal-to-noise ratio of each speaker anew:
96 ratios, forward and backward, although there are only 16 pairs of an estimate and a speaker.
The 16 can be computed in one go and summed along each permutation.
A good finding names the ratios that are computed again for every permutation and the line.
"""

from itertools import permutations

import steplab
import torch
from torch import nn

from common import Block, by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 4,
    "CAUSE": "the ratio of each speaker is computed anew for each of the 24 permutations, 96 instead of 16",
    "FIX": "compute the 16 ratios of all pairs once and sum them along each permutation",
}
SPEAKERS, HOP = 4, 16
SAMPLES, WIDTH, LAYERS = by_device(32000, 6400), by_device(512, 64), by_device(4, 1)
ORDERS = list(permutations(range(SPEAKERS)))


class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(HOP, WIDTH)
        self.blocks = nn.Sequential(*[Block(WIDTH, WIDTH // 64) for _ in range(LAYERS)])
        self.decode = nn.Linear(WIDTH, SPEAKERS * HOP)

    def forward(self, mixture):
        b, n = mixture.shape
        x = self.blocks(self.encode(mixture.view(b, n // HOP, HOP)))
        voices = self.decode(x).view(b, n // HOP, SPEAKERS, HOP)
        return voices.transpose(1, 2).reshape(b, SPEAKERS, n).float()


def ratio(estimate, voice):
    """Return the scale-invariant signal-to-noise ratio along the last dimension, in dB."""
    scale = (estimate * voice).sum(-1, keepdim=True) / voice.square().sum(-1, keepdim=True)
    signal = scale * voice
    noise = (estimate - signal).square().sum(-1)
    return 10 * torch.log10(signal.square().sum(-1) / (noise + 1e-8) + 1e-8)


def per_order(estimates, voices):
    totals = []
    for order in ORDERS:
        ratios = [ratio(estimates[:, e], voices[:, v]) for v, e in enumerate(order)]  # guilty
        totals.append(torch.stack(ratios).mean(0))
    return -torch.stack(totals).amax(0).mean()


def per_pair():
    orders = torch.tensor(ORDERS, device=device())  # the estimate of each speaker
    speakers = torch.arange(SPEAKERS, device=device())

    def criterion(estimates, voices):
        pairs = ratio(estimates[:, :, None], voices[:, None])
        return -pairs[:, orders, speakers].mean(-1).amax(1).mean()

    return criterion


def build(criterion):
    my_turn()

    def batch(size):
        voices = torch.randn(size, SPEAKERS, SAMPLES, device=device())
        return voices.sum(1), voices

    def loss(model, pair):
        with mixed():
            return criterion(model(pair[0]), pair[1])

    return steplab.UserModel(
        Separator(), lambda size: in_turn(lambda: batch(size), 4), loss, unit="recordings"
    )


def faulty():
    return build(per_order)


def clean():
    return build(per_pair())
