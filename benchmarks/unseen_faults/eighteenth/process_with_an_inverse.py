"""A Gaussian process models how a robot arm's joints answer to torques: one process for each joint, whose
length scales are trained on the marginal likelihood. The likelihood is written down as in the textbook,
with the inverse of the covariance and the logarithm of its determinant, so the same matrix is factorized
twice and fully inverted, where one Cholesky factor gives both the solution and the determinant.
A good finding names the explicit inverse (or the second factorization) and its line.
"""

import torch
from torch import nn

from common import by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the covariance is inverted and then factorized again for its determinant",
    "FIX": "one torch.linalg.cholesky: cholesky_solve for the quadratic form, its diagonal for the logdet",
}
JOINTS, SAMPLES, INPUTS = by_device(7, 6), by_device(2048, 256), 21


class Processes(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.full((JOINTS, 1, INPUTS), 1.5))
        self.strength = nn.Parameter(torch.zeros(JOINTS))
        self.noise = nn.Parameter(torch.full((JOINTS,), -1.0))

    def covariance(self, x):
        x = x / self.scales.exp()
        norms = x.square().sum(-1)
        square = norms[:, :, None] + norms[:, None, :] - 2 * x @ x.mT
        kernel = torch.exp(self.strength[:, None, None] - 0.5 * square)
        return kernel + torch.diag_embed(self.noise.exp()[:, None].expand(-1, x.shape[1]))


def likelihood_by_inverse(covariance, y):
    inverse = torch.linalg.inv(covariance)  # guilty
    fit = (y[:, None] @ inverse @ y[:, :, None]).flatten()
    return fit + torch.logdet(covariance)


def likelihood_by_factor(covariance, y):
    factor = torch.linalg.cholesky(covariance)
    fit = torch.linalg.solve_triangular(factor, y[:, :, None], upper=False).square().sum((1, 2))
    return fit + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)


def make(likelihood):
    torch.manual_seed(0)
    model = Processes().to(device())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def draw():
        x = torch.randn(SAMPLES, INPUTS, device=device())
        y = torch.sin(x[:, :JOINTS]).T + 0.1 * torch.randn(JOINTS, SAMPLES, device=device())
        return x.expand(JOINTS, -1, -1), y

    draws = in_turn(draw)

    def step():
        x, y = next(draws)
        loss = 0.5 * likelihood(model.covariance(x), y).mean() / SAMPLES
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return make(likelihood_by_inverse)


def clean():
    return make(likelihood_by_factor)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
