"""Experts choose their tokens. The results are put back into a tensor of zeros that has room for
all tokens of every expert (experts x tokens x width), which is then summed over the experts.
A good finding names that tensor, nearly all of it zeros, or its fills and sums, and the line.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 8192,
    "CPU_BATCH": 1536,
    "CAUSE": "results are combined in a tensor of zeros with room for every token at every expert",
    "FIX": "index_add into one tensor of all tokens",
}
WIDTH, HIDDEN, EXPERTS = by_device(1024, 64), by_device(2048, 128), by_device(64, 32)
LAYERS, SHARE, CLASSES = 2, 2, 16


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x):
        y = self.norm(x)
        gates, chosen = self.router(y).softmax(-1).T.topk(SHARE * len(x) // EXPERTS)
        parts = y.index_select(0, chosen.flatten()).view(EXPERTS, -1, WIDTH)
        parts = torch.bmm(F.gelu(torch.bmm(parts, self.up)), self.down)
        return x + self.combine(x, parts * gates[..., None].to(parts.dtype), chosen)


class Dense(Mixture):
    def combine(self, x, parts, chosen):
        room = parts.new_zeros(EXPERTS, len(x), WIDTH)
        return room.scatter(1, chosen[..., None].expand(-1, -1, WIDTH), parts).sum(0)  # guilty


class Added(Mixture):
    def combine(self, x, parts, chosen):
        out = parts.new_zeros(len(x), WIDTH)
        return out.index_add(0, chosen.flatten(), parts.flatten(0, 1))


def build(mixture):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 32, device=device()),
                torch.randint(CLASSES, (size,), device=device()),
            )
        )

    def loss(model, batch):
        with mixed():
            return F.cross_entropy(model(batch[0]), batch[1])

    model = nn.Sequential(
        nn.Linear(32, WIDTH), *(mixture() for _ in range(LAYERS)), nn.Linear(WIDTH, CLASSES)
    )
    return steplab.UserModel(model, batches, loss, unit="tokens")


def faulty():
    return build(Dense)


def clean():
    return build(Added)
