"""A graph network is fitted to a small set of molecules, all of them in one batch, with a third of
them held out for a validation pass after each epoch. The last twenty validation losses are kept for early stopping. The validation pass
runs without no_grad, so each kept loss holds on to its graph with all activations.
A good finding names the validation losses kept with their graphs (no torch.no_grad, no detach), and the
line of the validation pass or the one that keeps the loss.
"""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the kept validation losses hold the graphs and activations of their validation passes",
    "FIX": "validate under torch.no_grad()",
}
MOLECULES, VALIDATION = by_device(40_000, 240), by_device(20_000, 120)
ATOMS, BONDS, KINDS = 20, 42, 16
WIDTH, LAYERS, PATIENCE = by_device(256, 64), 6, 20


class MoleculeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, WIDTH)
        self.message = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.update = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, atoms, source, target):
        x = self.kinds(atoms)
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(x).index_select(0, source)
            x = x + F.silu(update(x) + torch.zeros_like(sent[: len(x)]).index_add(0, target, sent))
        return self.head(x.view(-1, ATOMS, WIDTH).mean(1)).squeeze(-1)


def molecules(count):
    first = torch.arange(count, device=device()).repeat_interleave(BONDS) * ATOMS
    source, target = torch.randint(ATOMS, (2, count * BONDS), device=device()) + first
    atoms = torch.randint(KINDS, (count * ATOMS,), device=device())
    return (atoms, source, target), torch.randn(count, device=device())


def loss_of(model, graph, wanted):
    with mixed():
        found = model(*graph)
    return F.mse_loss(found.float(), wanted)


def validate_plainly(model, held_out):
    return loss_of(model, *held_out)  # guilty


def validate(model, held_out):
    with torch.no_grad():
        return loss_of(model, *held_out)


def build(validation):
    model = MoleculeNet().to(device())
    optimizer = adamw(model)
    training, held_out = molecules(MOLECULES), molecules(VALIDATION)
    recent = deque(maxlen=PATIENCE)

    def step():
        loss = loss_of(model, *training)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recent.append(validation(model, held_out))
        return loss.detach()

    return step


def faulty():
    return build(validate_plainly)


def clean():
    return build(validate)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
