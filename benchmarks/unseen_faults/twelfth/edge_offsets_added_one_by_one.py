"""A graph network predicts a property of molecules. Collate joins the molecules of a batch into one
graph and adds the offset of each molecule to its bonds one bond at a time.
A good finding names the Python loop over the bonds in collate.
"""

import random

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "collate shifts the bonds of all molecules one by one in a Python loop",
    "FIX": "keep bonds as tensors, concatenate them and add the repeated offsets at once",
}
MOLECULES, BATCH, WIDTH = 1024, by_device(2048, 192), by_device(256, 48)
KINDS, LAYERS = 16, 3


def molecules():
    """Return (kinds of atoms, bonds) of each molecule; bonds are a list of pairs."""
    chance = random.Random(0)
    made = []
    for _ in range(MOLECULES):
        atoms = chance.randint(15, 30)
        bonds = [(chance.randrange(atoms), chance.randrange(atoms)) for _ in range(3 * atoms)]
        made.append((torch.tensor([chance.randrange(KINDS) for _ in range(atoms)]), bonds))
    return made


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms = nn.Embedding(KINDS, WIDTH)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.other = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, kinds, source, target, owner, count):
        h = self.atoms(kinds)
        for own, other in zip(self.own, self.other, strict=True):
            sent = other(h).index_select(0, source)
            got = torch.zeros_like(h, dtype=sent.dtype).index_add(0, target, sent)
            h = F.relu(own(h) + got)
        pooled = torch.zeros(count, WIDTH, dtype=h.dtype, device=h.device).index_add(0, owner, h)
        return self.head(pooled).squeeze(-1)


def prepare():
    torch.manual_seed(0)
    model = Network().to(device())
    return model, adamw(model), molecules(), torch.randn(MOLECULES), random.Random(1)


def learn(model, optimizer, graph, wanted):
    kinds, source, target, owner = (part.to(device()) for part in graph)
    wanted = wanted.to(device())
    with mixed():
        y = model(kinds, source, target, owner, BATCH)
    loss = F.smooth_l1_loss(y.float(), wanted)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data, values, chance = prepare()

    def collate(chosen):
        source, target, offset = [], [], 0
        for i in chosen:
            kinds, bonds = data[i]
            for a, b in bonds:  # guilty
                source.append(a + offset)
                target.append(b + offset)
            offset += len(kinds)
        kinds = [data[i][0] for i in chosen]
        owner = torch.repeat_interleave(torch.tensor([len(k) for k in kinds]))
        return torch.cat(kinds), torch.tensor(source), torch.tensor(target), owner

    def step():
        chosen = chance.choices(range(MOLECULES), k=BATCH)
        return learn(model, optimizer, collate(chosen), values[chosen])

    return step


def clean():
    model, optimizer, data, values, chance = prepare()
    data = [(kinds, torch.tensor(bonds).T.contiguous()) for kinds, bonds in data]

    def collate(chosen):
        kinds, bonds = zip(*(data[i] for i in chosen), strict=True)
        atoms = torch.tensor([len(k) for k in kinds])
        first = (atoms.cumsum(0) - atoms).repeat_interleave(
            torch.tensor([b.shape[1] for b in bonds])
        )
        source, target = torch.cat(bonds, 1) + first
        return torch.cat(kinds), source, target, torch.repeat_interleave(atoms)

    def step():
        chosen = chance.choices(range(MOLECULES), k=BATCH)
        return learn(model, optimizer, collate(chosen), values[chosen])

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
