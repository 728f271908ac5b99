"""Reinforcement learning of a small robot with an ensemble of 128 tiny critics. Each critic is a
network of its own, and a Python loop calls one after the other.
A good finding names the many small layers of the critics that run one by one, and the line that
calls them in a loop.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the critics of the ensemble are called one after the other, each with tiny layers",
    "FIX": "stack the weights of all critics and compute them with batched products",
}
BATCH, STATE, ACTION, CRITICS = by_device(256, 112), 17, 6, 128
WIDTH = by_device(128, 56)


def critic():
    return nn.Sequential(
        nn.Linear(STATE + ACTION, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 1),
    )


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.critics = nn.ModuleList(critic() for _ in range(CRITICS))

    def forward(self, x):
        return torch.stack([critic(x) for critic in self.critics]).squeeze(-1)  # guilty


class Batched(nn.Module):
    def __init__(self):
        super().__init__()
        critics = [critic() for _ in range(CRITICS)]
        layers = [[c[i] for c in critics] for i in (0, 2, 4)]
        self.weights = nn.ParameterList(
            torch.stack([layer.weight.detach().T for layer in same]) for same in layers
        )
        self.biases = nn.ParameterList(
            torch.stack([layer.bias.detach()[None] for layer in same]) for same in layers
        )

    def forward(self, x):
        x = x.expand(CRITICS, *x.shape)
        x = F.relu(torch.baddbmm(self.biases[0], x, self.weights[0]))
        x = F.relu(torch.baddbmm(self.biases[1], x, self.weights[1]))
        return torch.baddbmm(self.biases[2], x, self.weights[2]).squeeze(-1)


def batch():
    seen = torch.randn(BATCH, STATE + ACTION, device=device())
    return seen, torch.randn(BATCH, device=device())


def training(kind):
    model = kind().to(device())
    optimizer, data = adamw(model), in_turn(batch)

    def step():
        seen, wanted = next(data)
        with mixed():
            values = model(seen)
        loss = F.mse_loss(values.float(), wanted.expand(CRITICS, -1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(Loop)


def clean():
    return training(Batched)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
