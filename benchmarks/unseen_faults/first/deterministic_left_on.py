"""Message passing on a graph of nodes and edges."""

import os

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, device, my_turn, pick

FAULT = {
    "NAME": "deterministic_left_on",
    "CAUSE": "torch.use_deterministic_algorithms(True) was left on from debugging, so every index_add sorts its indices and every new buffer is filled, instead of atomic adds into fresh memory.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Turn it off for training runs and use it only to reproduce a bug.",
    "STYLE": "factory",
    "BATCH": 1,
}
NODES, EDGES, WIDTH, LAYERS = pick(200_000, 200), pick(1_500_000, 900), pick(128, 16), pick(3, 2)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h, source, target):
        messages = F.relu(self.message(h)).index_select(0, source)
        gathered = torch.zeros_like(h).index_add(0, target, messages.float())
        return h + F.relu(self.update(torch.cat([self.norm(h), gathered], dim=1)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, 16)

    def forward(self, x, source, target):
        for layer in self.layers:
            x = layer(x, source, target)
        return self.out(x)


def batches(size):
    nodes, edges = torch.randn(NODES * size, WIDTH), torch.randint(NODES * size, (2, EDGES * size))
    labels = torch.randint(16, (NODES * size,))
    graph = tuple(
        t.to(device()) for t in (nodes, edges[0].contiguous(), edges[1].contiguous(), labels)
    )
    while True:
        yield graph


def loss(model, batch):
    x, source, target, labels = batch
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.cross_entropy(model(x, source, target), labels)


def make():
    model = Network()
    my_turn()
    return steplab.UserModel(model=model, batches=batches, loss=loss, optimizer=adamw)


def faulty():
    torch.use_deterministic_algorithms(True)  # FAULT
    return make()


def clean():
    return make()
