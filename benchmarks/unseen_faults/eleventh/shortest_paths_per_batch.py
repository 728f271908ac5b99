"""A graph transformer on molecules adds a learned bias by the number of bonds between two atoms to its
attention. The numbers of bonds are searched breadth first, in Python, whenever a batch is made.
A good finding names the shortest paths that are searched anew for every batch, and the line that does it.
"""

from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the shortest paths between all atoms of each molecule are searched in Python in every batch",
    "FIX": "compute the distances of every molecule once and keep them in the dataset",
}
MOLECULES, ATOMS, KINDS, FARTHEST = 256, 48, 32, 12
BATCH, WIDTH, HEADS, LAYERS = by_device(128, 12), by_device(512, 96), 4, by_device(6, 2)


class Molecule:
    def __init__(self, rng):
        self.kinds = rng.integers(KINDS, size=ATOMS)
        self.bonds = [[] for _ in range(ATOMS)]
        self.energy = np.float32(rng.standard_normal())
        for atom in range(1, ATOMS):
            other = int(rng.integers(max(0, atom - 4), atom))
            self.bonds[atom].append(other)
            self.bonds[other].append(atom)


def path_lengths(molecule):
    lengths = np.full((ATOMS, ATOMS), FARTHEST)
    for start in range(ATOMS):
        seen, queue = {start: 0}, deque([start])
        while queue:
            atom = queue.popleft()
            for neighbor in molecule.bonds[atom]:
                if neighbor not in seen:
                    seen[neighbor] = seen[atom] + 1
                    queue.append(neighbor)
        for atom, length in seen.items():
            lengths[start, atom] = min(length, FARTHEST)
    return lengths


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, bias):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        x = x + self.out(y.transpose(1, 2).reshape(b, n, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Graphormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.atoms, self.bias = nn.Embedding(KINDS, WIDTH), nn.Embedding(FARTHEST + 1, HEADS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, kinds, lengths):
        x = self.atoms(kinds)
        bias = self.bias(lengths).permute(0, 3, 1, 2).contiguous()
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x.mean(1)).squeeze(1)


def prepare():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    molecules = [Molecule(rng) for _ in range(MOLECULES)]
    model = Graphormer().to(device())
    return molecules, model, adamw(model), rng


def learn(model, optimizer, molecules, lengths):
    kinds = torch.from_numpy(np.stack([m.kinds for m in molecules])).to(device())
    energy = torch.from_numpy(np.stack([m.energy for m in molecules])).to(device())
    with mixed():
        guess = model(kinds, torch.from_numpy(lengths).to(device()))
    loss = F.l1_loss(guess.float(), energy)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    molecules, model, optimizer, rng = prepare()

    def step():
        batch = [molecules[i] for i in rng.integers(MOLECULES, size=BATCH)]
        lengths = np.stack([path_lengths(molecule) for molecule in batch])  # guilty
        return learn(model, optimizer, batch, lengths)

    return step


def clean():
    molecules, model, optimizer, rng = prepare()
    all_lengths = np.stack([path_lengths(molecule) for molecule in molecules])

    def step():
        chosen = rng.integers(MOLECULES, size=BATCH)
        return learn(model, optimizer, [molecules[i] for i in chosen], all_lengths[chosen])

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
