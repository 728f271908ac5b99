"""A graph network predicts a property of molecules that are batched as one large graph. After each
layer the nodes of every molecule are normalized by themselves: in a Python loop over the molecules.
A good finding names the loop of small operators over the molecules of the batch, and the line
that normalizes one molecule at a time.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the nodes of each molecule are normalized in a Python loop over the molecules",
    "FIX": "sum up by molecule with index_add and normalize all nodes at once",
}
GRAPHS, NODES, DEGREE, FEATURES = by_device(256, 72), 24, 4, 16
WIDTH, LAYERS = by_device(256, 96), 3


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))


class NormInLoop(Norm):
    def forward(self, h, graph, sizes, count):
        done = []
        for one in h.split(sizes):
            done.append((one - one.mean(0)) / (one.var(0, unbiased=False) + 1e-5).sqrt())  # guilty
        return torch.cat(done) * self.scale + self.shift


class NormAtOnce(Norm):
    def forward(self, h, graph, sizes, count):
        zeros = h.new_zeros(len(sizes), WIDTH)
        h = h - (zeros.index_add(0, graph, h) / count).index_select(0, graph)
        variance = zeros.index_add(0, graph, h * h) / count
        factor = torch.rsqrt(variance + 1e-5) * self.scale
        return torch.addcmul(self.shift, h, factor.index_select(0, graph))


class Network(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.atoms = nn.Linear(FEATURES, WIDTH)
        self.messages = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(norm() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, atoms, source, target, graph, sizes, count):
        h = self.atoms(atoms)
        for message, own, norm in zip(self.messages, self.own, self.norms, strict=True):
            sent = message(h).index_select(0, source)
            new = own(h).index_add(0, target, sent)
            h = h + F.silu(norm(new, graph, sizes, count))
        total = h.new_zeros(len(sizes), WIDTH).index_add(0, graph, h)
        return self.head(total / count).squeeze(-1)


def batch():
    sizes = torch.randint(NODES // 2, NODES + NODES // 2, (GRAPHS,))
    graph = torch.repeat_interleave(torch.arange(GRAPHS), sizes)
    start = (sizes.cumsum(0) - sizes)[graph]
    target = torch.arange(len(graph)).repeat_interleave(DEGREE)
    chance = torch.rand(len(target))
    source = start[target] + (chance * sizes[graph][target]).long()
    count = sizes[:, None].float()
    atoms, wanted = torch.randn(len(graph), FEATURES), torch.randn(GRAPHS)
    tensors = [x.to(device()) for x in (atoms, source, target, graph, count, wanted)]
    return *tensors, sizes.tolist()


def training(norm):
    model = Network(norm).to(device())
    optimizer, data = adamw(model), in_turn(batch)

    def step():
        atoms, source, target, graph, count, wanted, sizes = next(data)
        guess = model(atoms, source, target, graph, sizes, count)
        loss = F.mse_loss(guess, wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(NormInLoop)


def clean():
    return training(NormAtOnce)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
