"""A policy of independent joints is written as MultivariateNormal with a diagonal covariance
matrix: every state of the batch has its matrix factored and a triangular system solved.
A good finding names the Cholesky factors and solves of diagonal matrices, and the line.
"""

import torch
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a diagonal Gaussian is a MultivariateNormal: a Cholesky factor and a solve per state",
    "FIX": "Independent(Normal(mean, deviation), 1)",
}
BATCH, STATE, JOINTS = by_device(8192, 2048), 64, by_device(32, 16)
WIDTH = by_device(1024, 192)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(STATE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.mean, self.spread = nn.Linear(WIDTH, JOINTS), nn.Linear(WIDTH, JOINTS)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, states):
        h = self.body(states)
        deviation = nn.functional.softplus(self.spread(h)) + 0.1
        return self.mean(h), deviation, self.value(h).squeeze(-1)


def full(mean, deviation):
    return MultivariateNormal(mean, torch.diag_embed(deviation**2), validate_args=False)  # guilty


def diagonal(mean, deviation):
    return Independent(Normal(mean, deviation, validate_args=False), 1, validate_args=False)


def build(distribution):
    model = Policy().to(device())
    optimizer = adamw(model)
    data = in_turn(
        lambda: (
            torch.randn(BATCH, STATE, device=device()),
            torch.randn(BATCH, JOINTS, device=device()),
            torch.randn(BATCH, device=device()),
            torch.randn(BATCH, device=device()) - 20,
        )
    )

    def step():
        states, actions, gain, old = next(data)
        mean, deviation, value = model(states)
        policy = distribution(mean, deviation)
        ratio = torch.exp(((policy.log_prob(actions) - old) / JOINTS).clamp(-2, 2))
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        loss = 0.5 * (value - gain).square().mean() - surrogate - 0.01 * policy.entropy().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(full)


def clean():
    return build(diagonal)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
