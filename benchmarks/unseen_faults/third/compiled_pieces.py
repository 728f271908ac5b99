"""torch.compile decorates each small function of a block instead of the block, so nothing is fused
across them: every one reads and writes whole tensors, forward and backward.
A good finding names the many compiled graphs that are called one after the other for elementwise
work, and a line on which one of them is called.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 32,
    "CPU_BATCH": 16,
    "CAUSE": "four tiny functions are compiled one by one, so that elementwise work is not fused across them",
    "FIX": "compile the block that calls them",
}
TIME, WIDTH, LAYERS = by_device(1024, 128), by_device(1024, 256), 3


def normalize(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def modulate(x, scale, shift):
    return x * (1 + torch.tanh(scale)) + shift


def activate(x):
    return x * torch.sigmoid(1.702 * x)


def gated_sum(x, y, gate):
    return x + torch.sigmoid(gate) * y


class Block(nn.Module):
    def __init__(self, pieces):
        super().__init__()
        self.pieces = pieces
        self.norm, self.scale, self.shift, self.gate = (
            nn.Parameter(torch.full((WIDTH,), v)) for v in (1.0, 0.1, 0.1, 0.1)
        )
        self.mix = nn.Linear(WIDTH, WIDTH // 8)
        self.out = nn.Linear(WIDTH // 8, WIDTH)

    def forward(self, x):
        normalize, modulate, activate, gated_sum = self.pieces
        y = modulate(normalize(x, self.norm), self.scale, self.shift)
        y = gated_sum(activate(y), modulate(y, self.shift, self.scale), self.gate)  # guilty
        return gated_sum(x, activate(self.out(self.mix(y))), self.gate)


class Model(nn.Module):
    def __init__(self, pieces, compiled):
        super().__init__()
        self.embed, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Block(pieces) for _ in range(LAYERS))
        if compiled:
            for block in self.blocks:
                block.compile()

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def build(pieces, compiled):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME, 16, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    return steplab.UserModel(Model(pieces, compiled), batches, loss, tokens_per_sequence=TIME)


def faulty():
    pieces = [torch.compile(f) for f in (normalize, modulate, activate, gated_sum)]
    return build(pieces, compiled=False)


def clean():
    return build([normalize, modulate, activate, gated_sum], compiled=True)
