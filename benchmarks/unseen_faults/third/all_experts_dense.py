"""Every expert of the mixture computes every token, and the gate, which is zero for all but two of
them, weighs the results.
A good finding names the expert products that are multiplied by zero, six of eight, and the line
that sends all tokens through every expert.
"""

import steplab
import torch
import torch.nn.functional as F
from torch import nn

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 16,
    "CPU_BATCH": 10,
    "CAUSE": "all experts compute all tokens and a gate of zeros throws most results away",
    "FIX": "sort the tokens by expert and give each expert its own",
}
TIME, WIDTH, EXPERTS, CHOSEN = by_device(1024, 64), by_device(1024, 128), 8, 2


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def route(self, x):
        share, expert = self.gate(x).float().softmax(-1).topk(CHOSEN)
        return share / share.sum(-1, keepdim=True), expert


class Dense(Mixture):
    def forward(self, x):
        share, expert = self.route(x)
        gate = torch.zeros(len(x), EXPERTS, device=x.device).scatter(1, expert, share)
        every = torch.stack([e(x) for e in self.experts], dim=1)  # guilty
        return (gate.unsqueeze(-1) * every).sum(1)


class Sorted(Mixture):
    def forward(self, x):
        share, expert = self.route(x)
        order = expert.flatten().argsort(stable=True)
        token = order // CHOSEN
        sizes = torch.bincount(expert.flatten(), minlength=EXPERTS).tolist()
        parts = [e(part) for e, part in zip(self.experts, x[token].split(sizes), strict=True)]
        y = torch.cat(parts) * share.flatten()[order].unsqueeze(-1)
        return torch.zeros(x.shape, device=x.device).index_add(0, token, y.float())


class Model(nn.Module):
    def __init__(self, mixture):
        super().__init__()
        self.embed, self.norm = nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH)
        self.mixture, self.head = mixture(), nn.Linear(WIDTH, 32)

    def forward(self, x):
        h = self.embed(x)
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
    return build(Dense)


def clean():
    return build(Sorted)
