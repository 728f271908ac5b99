"""A graph network learns the stress in a mesh. The message along an edge begins with a linear layer of both
ends' features, which are gathered and joined for each edge: every node is multiplied by the weight once for
each of its sixteen neighbours. The layer is linear: its two halves can be applied to the nodes, and the
products gathered and added.
A good finding names the product (or the gathered and joined features) at the size of the edges, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "CAUSE": "the linear layer of the messages is applied to every edge instead of to every node",
    "FIX": "apply the two halves of the layer to the nodes, then gather and add per edge",
    "BATCH": 32,
    "CPU_BATCH": 1,
}
NODES, NEAR = by_device(2048, 960), 16
WIDTH, LAYERS = by_device(256, 48), by_device(6, 3)


class MeshLayer(nn.Module):
    def __init__(self, per_edge):
        super().__init__()
        self.per_edge = per_edge
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def messages(self, x, source, target):
        if self.per_edge:
            return self.mix(torch.cat([x[source], x[target]], 1))  # guilty
        first, second = self.mix.weight.split(WIDTH, 1)
        return F.linear(x, first, self.mix.bias)[source] + F.linear(x, second)[target]

    def forward(self, x, source, target):
        sent = F.silu(self.messages(self.norm(x), source, target))
        got = torch.zeros_like(x, dtype=sent.dtype).index_add(0, target, sent)
        return x + self.out(got / NEAR)


class MeshNet(nn.Module):
    def __init__(self, per_edge):
        super().__init__()
        self.into, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(MeshLayer(per_edge) for _ in range(LAYERS))

    def forward(self, x, source, target):
        x = self.into(x)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.head(x).squeeze(1)


def meshes(size):
    def batch():
        at, count = device(), size * NODES
        target = torch.arange(count, device=at).repeat_interleave(NEAR)
        near = torch.randint(NODES, (count * NEAR,), device=at)
        source = target // NODES * NODES + near
        return torch.randn(count, 6, device=at), source, target, torch.randn(count, device=at)

    return in_turn(batch)


def loss(model, batch):
    x, source, target, stress = batch
    with mixed():
        return F.mse_loss(model(x, source, target), stress)


def faulty():
    return steplab.UserModel(MeshNet(per_edge=True), meshes, loss, optimizer=adamw)


def clean():
    return steplab.UserModel(MeshNet(per_edge=False), meshes, loss, optimizer=adamw)
