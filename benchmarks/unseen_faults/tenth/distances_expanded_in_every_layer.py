"""A network for molecules expands the distances of all bonded atoms in 300 Gaussians, in every
interaction layer anew, although the atoms do not move from layer to layer.
A good finding names the expansion as the same in each layer, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 8192,
    "CPU_BATCH": 256,
    "CAUSE": "the Gaussian expansion of all distances is computed in every layer, always the same",
    "FIX": "expand the distances once per forward and hand the result to all layers",
}
NEIGHBORS, GAUSSIANS, WIDTH, LAYERS = 12, 300, by_device(128, 24), by_device(6, 5)


def expand(places, source, target):
    distance = (places[source] - places[target]).norm(dim=1, keepdim=True)
    centers = torch.linspace(0, 30, GAUSSIANS, device=places.device)
    return torch.exp(-10.0 * (distance - centers).square())


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter, self.mix = nn.Linear(GAUSSIANS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, expanded, source, target):
        messages = x[source] * self.filter(expanded)
        total = torch.zeros_like(x).index_add(0, target, messages.to(x.dtype))
        return x + F.silu(self.mix(total))


class Molecules(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Interaction() for _ in range(LAYERS))


class EveryLayer(Molecules):
    def forward(self, kinds, places, source, target):
        x = self.atoms(kinds)
        for layer in self.layers:
            expanded = expand(places, source, target)  # guilty
            x = layer(x, expanded, source, target)
        return self.head(x).squeeze(1)


class Once(Molecules):
    def forward(self, kinds, places, source, target):
        x = self.atoms(kinds)
        expanded = expand(places, source, target)
        for layer in self.layers:
            x = layer(x, expanded, source, target)
        return self.head(x).squeeze(1)


def build(model):
    my_turn()
    chance = torch.Generator(device()).manual_seed(1)

    def batches(size):
        def make():
            how = {"device": device(), "generator": chance}
            source = torch.randint(size, (size * NEIGHBORS,), **how)
            target = torch.arange(size, device=device()).repeat_interleave(NEIGHBORS)
            kinds = torch.randint(20, (size,), **how)
            places, energy = 5 * torch.randn(size, 3, **how), torch.randn(size, **how)
            return (kinds, places, source, target), energy

        return in_turn(make)

    def loss(model, batch):
        inputs, energy = batch
        with mixed():
            return F.mse_loss(model(*inputs), energy)

    return steplab.UserModel(model, batches, loss, unit="atoms")


def faulty():
    return build(EveryLayer())


def clean():
    return build(Once())
