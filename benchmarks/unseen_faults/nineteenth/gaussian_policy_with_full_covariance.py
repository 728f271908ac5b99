"""A humanoid learns to stand up with PPO. The policy gives a mean and a deviation for each joint, independent of
each other, but the distribution is a MultivariateNormal with a diagonal covariance matrix, as in a well-known
tutorial: for every state a matrix is made, factored and solved with, forward and backward.
A good finding names the factored matrices (Cholesky, triangular solves) of a diagonal covariance
and the line that makes the distribution or uses it.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a full covariance matrix is built and factored for a Gaussian with independent joints",
    "FIX": "Independent(Normal(mean, deviation), 1)",
}
BATCH, SEEN, JOINTS = by_device(8192, 704), by_device(376, 96), by_device(24, 17)
WIDTH = by_device(512, 384)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(SEEN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.mean, self.spread = nn.Linear(WIDTH, JOINTS), nn.Linear(WIDTH, JOINTS)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, states):
        x = self.body(states)
        return self.mean(x), F.softplus(self.spread(x)) + 0.05, self.value(x).squeeze(1)


def with_matrix(mean, deviation):
    return MultivariateNormal(mean, torch.diag_embed(deviation.square()))  # guilty


def joint_by_joint(mean, deviation):
    return Independent(Normal(mean, deviation), 1)


def training(gaussian):
    torch.manual_seed(0)
    policy = Policy().to(device())
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, fused=True)

    def make():
        states = torch.randn(BATCH, SEEN, device=device())
        moves = torch.randn(BATCH, JOINTS, device=device())
        before = Independent(Normal(torch.zeros_like(moves), 0.8), 1).log_prob(moves)
        return states, moves, before, *torch.randn(2, BATCH, device=device())

    batches = in_turn(make)

    def step():
        states, moves, before, advantage, returns = next(batches)
        mean, deviation, value = policy(states)
        chosen = gaussian(mean, deviation)
        ratio = (chosen.log_prob(moves) - before).clamp(max=5).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = F.mse_loss(value, returns) - gain - 0.01 * chosen.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def faulty():
    return training(with_matrix)


def clean():
    return training(joint_by_joint)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
