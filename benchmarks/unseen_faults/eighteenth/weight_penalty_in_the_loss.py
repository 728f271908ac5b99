"""A graph network tells a property of molecules and is regularized by the squares of its weights. The penalty
is added to the loss, so every weight goes through the forward and the backward pass a second time: it is
squared, summed, its gradient made and added to that of the data. Adam's weight_decay adds the same
gradient in the update that reads the weights anyway.
A good finding names the operations over all weights in the loss and the line of the penalty.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the L2 penalty is a term of the loss, over all weights and through autograd",
    "FIX": "torch.optim.Adam(..., weight_decay=2 * PENALTY), which adds the same gradient in the update",
}
BATCH, ATOMS, KINDS = by_device(64, 4), by_device(32, 8), 12
WIDTH, LAYERS = by_device(2048, 512), by_device(8, 4)
PENALTY = 1e-5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.own, self.near = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, bonds):
        y = self.norm(x)
        return x + self.out(F.silu(self.own(y) + self.near(bonds @ y)))


class MoleculeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, atoms, bonds):
        x = self.kinds(atoms)
        for layer in self.layers:
            x = layer(x, bonds)
        return self.head(x.mean(1)).squeeze(1)


def make(penalized):
    torch.manual_seed(0)
    model = MoleculeNet().to(device())
    decay = 0.0 if penalized else 2 * PENALTY
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=decay, fused=True)

    def batch():
        atoms = torch.randint(KINDS, (BATCH, ATOMS), device=device())
        bonds = (torch.rand(BATCH, ATOMS, ATOMS, device=device()) < 3 / ATOMS).float() / 3
        return atoms, bonds, torch.randn(BATCH, device=device())

    batches = in_turn(batch)

    def step():
        atoms, bonds, wanted = next(batches)
        with mixed():
            loss = F.mse_loss(model(atoms, bonds).float(), wanted)
        if penalized:
            loss = loss + PENALTY * sum(weight.pow(2).sum() for weight in model.parameters())  # guilty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return make(penalized=True)


def clean():
    return make(penalized=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
