"""Messages between the atoms of molecules, each multiplied by a matrix that a small network makes
from the type of the bond. There are four types, but the network runs for each of the
thousands of bonds and makes a matrix for every one.
A good finding names the matrices that are made per bond, by the network or the product with them.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the edge network makes a matrix for every bond although there are four kinds of them",
    "FIX": "make the four matrices, multiply all atoms with them, and pick by type",
}
ATOMS, BONDS, TYPES, KINDS = by_device(16384, 2800), by_device(40000, 3000), 4, 20
WIDTH, ROUNDS = by_device(64, 32), 3


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(TYPES, 64), nn.ReLU(), nn.Linear(64, WIDTH * WIDTH))
        self.atoms = nn.Embedding(KINDS, WIDTH)
        self.update = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 1))
        self.register_buffer("one_hot", torch.eye(TYPES))

    def messenger(self, source, types):
        matrices = self.edge(self.one_hot[types]).view(-1, WIDTH, WIDTH)  # guilty
        return lambda h: torch.bmm(h.index_select(0, source).unsqueeze(1), matrices).squeeze(1)

    def forward(self, kinds, source, target, types):
        h = self.atoms(kinds)
        message = self.messenger(source, types)
        for _ in range(ROUNDS):
            received = torch.zeros_like(h).index_add(0, target, message(h).to(h.dtype))
            h = self.update(received, h)
        return self.head(h).mean()


class MessagesByType(Messages):
    def messenger(self, source, types):
        matrices = self.edge(self.one_hot).view(TYPES, WIDTH, WIDTH)
        matrices = matrices.transpose(0, 1).flatten(1)
        pick = source * TYPES + types
        return lambda h: (h @ matrices).view(-1, WIDTH).index_select(0, pick)


def build(kind):
    model = kind().to(device())
    optimizer = adamw(model)

    def batch():
        kinds = torch.randint(KINDS, (ATOMS,), device=device())
        source, target = torch.randint(ATOMS, (2, BONDS), device=device())
        return kinds, source, target, torch.randint(TYPES, (BONDS,), device=device())

    data = in_turn(batch)

    def step():
        kinds, source, target, types = next(data)
        with mixed():
            energy = model(kinds, source, target, types)
        loss = F.mse_loss(energy.float(), energy.new_ones((), dtype=torch.float32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(Messages)


def clean():
    return build(MessagesByType)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
