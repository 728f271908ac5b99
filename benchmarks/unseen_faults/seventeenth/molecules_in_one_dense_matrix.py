"""A graph network over small molecules puts the bonds of a batch into one block-diagonal matrix, as libraries
for graphs do with sparse ones. This one is dense: each layer multiplies the atoms of every molecule
by zeros for the atoms of all the others. The blocks alone, in one batched product, do the same.
A good finding names the product with the (mostly zero) matrix of all atoms by all atoms, and its line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the bonds of all molecules are one dense block-diagonal matrix, nearly all of it zeros",
    "FIX": "multiply the blocks by a batched product: bonds @ atoms for (batch, atoms, atoms)",
}
BATCH, ATOMS, KINDS = by_device(256, 48), by_device(96, 20), 30
WIDTH, LAYERS = by_device(512, 80), by_device(12, 4)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.own, self.heard = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, bonds, spread):
        y = self.norm1(x)
        x = x + F.silu(self.own(y) + self.heard(spread(bonds, y)))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class MoleculeNet(nn.Module):
    def __init__(self, spread):
        super().__init__()
        self.kinds, self.spread = nn.Embedding(KINDS, WIDTH), spread
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, atoms, bonds):
        x = self.kinds(atoms)
        for layer in self.layers:
            x = layer(x, bonds, self.spread)
        return self.head(x.mean(1)).squeeze(1)


def one_matrix(bonds):
    return torch.block_diag(*bonds)


def spread_over_all(bonds, atoms):
    return (bonds @ atoms.flatten(0, 1)).view_as(atoms)  # guilty


def blocks(bonds):
    return bonds


def spread_within(bonds, atoms):
    return bonds @ atoms


def build(join, spread):
    model = MoleculeNet(spread).to(device())
    optimizer = adamw(model)

    def molecules():
        bonds = (torch.rand(BATCH, ATOMS, ATOMS, device=device()) < 3 / ATOMS).float()
        bonds = bonds / bonds.sum(2, keepdim=True).clamp(min=1)
        atoms = torch.randint(KINDS, (BATCH, ATOMS), device=device())
        return atoms, bonds, torch.randn(BATCH, device=device())

    data = in_turn(molecules)

    def step():
        atoms, bonds, energies = next(data)
        with mixed():
            loss = F.mse_loss(model(atoms, join(bonds)).float(), energies)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(one_matrix, spread_over_all)


def clean():
    return build(blocks, spread_within)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
