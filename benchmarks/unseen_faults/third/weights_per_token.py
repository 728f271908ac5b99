"""The weights of each token's expert are gathered into a tensor with one matrix per token, so the
mixture moves and keeps as many matrices as there are tokens.
A good finding names the gathered weights (by far the largest tensor of the step, in memory and in
time), and the line that indexes the experts' weights by token.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "memory",
    "STYLE": "factory",
    "BATCH": 8,
    "CPU_BATCH": 4,
    "CAUSE": "the expert's weight matrix is gathered once per token: (tokens, width, hidden) instead of (experts, width, hidden)",
    "FIX": "sort the tokens by expert and multiply each group with its expert's matrix",
}
TIME, WIDTH, HIDDEN, EXPERTS = by_device(512, 96), by_device(512, 128), by_device(1024, 192), 8


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def route(self, x):
        return self.gate(x).float().softmax(-1).max(-1)


class Gathered(Mixture):
    def forward(self, x):
        share, expert = self.route(x)
        up, down = self.up[expert], self.down[expert]  # guilty
        h = F.silu(torch.einsum("nd,ndh->nh", x, up))
        return torch.einsum("nh,nhd->nd", h, down) * share.unsqueeze(-1)


class Sorted(Mixture):
    def forward(self, x):
        share, expert = self.route(x)
        order = expert.argsort(stable=True)
        sizes = torch.bincount(expert, minlength=EXPERTS).tolist()
        parts = [
            F.silu(part @ self.up[i]) @ self.down[i] for i, part in enumerate(x[order].split(sizes))
        ]
        return torch.cat(parts)[order.argsort()] * share.unsqueeze(-1)


class Model(nn.Module):
    def __init__(self, mixture):
        super().__init__()
        self.embed, self.head = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm, self.mixture = nn.LayerNorm(WIDTH), mixture()

    def forward(self, x):
        h = self.mix(self.embed(x))[0]
        return self.head(h + self.mixture(self.norm(h).flatten(0, 1)).view_as(h))


def build(mixture):
    my_turn()

    def batches(size):
        return in_turn(lambda: torch.randn(size, TIME, 32, device=device()))

    def loss(model, x):
        with mixed():
            return F.mse_loss(model(x), x)

    return steplab.UserModel(Model(mixture), batches, loss, tokens_per_sequence=TIME)


def faulty():
    return build(Gathered)


def clean():
    return build(Sorted)
