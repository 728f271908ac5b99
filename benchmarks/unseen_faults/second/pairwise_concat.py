"""A graph attention network on dense graphs, as the first implementations wrote it."""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "pairwise_concat",
    "CAUSE": "The score of every pair of nodes is a product with the concatenation of both states, which is materialized as nodes x nodes x 2 width and kept for the backward.",
    "LINE": "# FAULT",
    "KIND": "memory",
    "FIX": "The product of a concatenation is the sum of two products: one score per node for each half of the vector, added by broadcasting.",
    "STYLE": "factory",
    "BATCH": 16,
    "WHY": "The concatenated pairs of 512 nodes hold gigabytes per layer and are read and written several times; a[:d] h_i + a[d:] h_j needs two numbers per node.",
    "GAIN_MS": None,
}
WIDTH, KEYS, LAYERS, NODES = pick(1024, 32), pick(128, 8), pick(8, 1), pick(512, 8)


class GraphAttention(nn.Module):
    def __init__(self, concatenates):
        super().__init__()
        self.keys, self.values = nn.Linear(WIDTH, KEYS), nn.Linear(WIDTH, WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Parameter(torch.randn(2 * KEYS) * KEYS**-0.5)
        self.concatenates = concatenates

    def scores(self, h):
        if self.concatenates:
            b, n, d = h.shape
            left = h[:, :, None].expand(b, n, n, d)
            right = h[:, None].expand(b, n, n, d)
            return torch.cat([left, right], dim=-1) @ self.a  # FAULT
        return (h @ self.a[:KEYS])[:, :, None] + (h @ self.a[KEYS:])[:, None]

    def forward(self, x):
        weights = F.leaky_relu(self.scores(self.keys(x)), 0.2).softmax(-1)
        return self.proj(weights @ self.values(x))


class Layer(nn.Module):
    def __init__(self, concatenates):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = GraphAttention(concatenates)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Network(nn.Module):
    def __init__(self, concatenates):
        super().__init__()
        self.inward, self.outward = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64)
        self.layers = nn.ModuleList(Layer(concatenates) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, nodes):
        x = self.inward(nodes)
        for layer in self.layers:
            x = layer(x)
        return self.outward(self.norm(x))


def batches(size):
    ready = [
        (
            torch.randn(size, NODES, 64, device=device()),
            torch.randint(64, (size, NODES), device=device()),
        )
        for _ in range(4)
    ]
    while True:
        yield from ready


def loss(model, batch):
    nodes, labels = batch
    with torch.autocast(nodes.device.type, torch.bfloat16):
        return F.cross_entropy(model(nodes).flatten(0, 1), labels.flatten())


def make(concatenates):
    torch.manual_seed(0)
    model = Network(concatenates)
    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    return make(concatenates=True)


def clean():
    return make(concatenates=False)
