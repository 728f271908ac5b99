"""A graph network predicts how a field on a fixed mesh goes on. The mesh never changes, but every layer makes
its sparse adjacency matrix out of the list of edges anew and coalesces it, which sorts all edges, for
each layer of each step; made once, the matrix would serve all of them.
A good finding names the sorting (or the building) of the same sparse matrix again and again and the line
that does it.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the sparse adjacency of a fixed mesh is built and its edges sorted in every layer",
    "FIX": "coalesce the adjacency once in __init__ and keep it as a buffer for all layers",
    "BATCH": 8,
    "CPU_BATCH": 2,
}
NODES, DEGREE = by_device(100_000, 2500), 8
FIELDS, WIDTH, LAYERS = 4, by_device(128, 32), by_device(6, 4)


def mesh():
    torch.manual_seed(1)
    here = torch.arange(NODES).repeat_interleave(DEGREE)
    there = (here + torch.randint(-40, 41, (NODES * DEGREE,))) % NODES
    return torch.stack((here, there))[:, torch.randperm(NODES * DEGREE)]


def adjacency(edges):
    weights = torch.full((edges.shape[1],), 1 / DEGREE, device=edges.device)
    matrix = torch.sparse_coo_tensor(edges, weights, (NODES, NODES), check_invariants=False)
    return matrix.coalesce()  # guilty


class MeshNet(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.register_buffer("edges", mesh())
        self.register_buffer("adjacency", adjacency(self.edges) if keep else None)
        self.inside, self.outside = nn.Linear(FIELDS, WIDTH), nn.Linear(WIDTH, FIELDS)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.near = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def neighbors(self, x):
        matrix = adjacency(self.edges) if self.adjacency is None else self.adjacency
        return torch.sparse.mm(matrix, x.flatten(1)).view_as(x)

    def forward(self, field):
        x = self.inside(field)
        for own, near in zip(self.own, self.near, strict=True):
            x = x + F.silu(own(x) + near(self.neighbors(x)))
        return field + self.outside(x)


def fields(size):
    return in_turn(lambda: tuple(torch.randn(2, NODES, size, FIELDS, device=device())), 4)


def loss(model, batch):
    now, after = batch
    return F.mse_loss(model(now), after)


def faulty():
    return steplab.UserModel(MeshNet(keep=False), fields, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(MeshNet(keep=True), fields, loss, optimizer=adamw)
