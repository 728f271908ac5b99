"""The likelihood of a Gaussian process (deep kernel learning) is written as in the book, with the
inverse and the log-determinant of the kernel matrix: the matrix is factored twice without using its
symmetry, and its inverse is formed and differentiated although only one vector is solved for.
A good finding names the inverse (or the two factorizations of one matrix), and the line.
"""

import math

import torch
from torch import nn

from common import adamw, by_device, device, in_turn, main

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the kernel matrix is inverted, and factored once more for its determinant, instead of one Cholesky factor for both",
    "FIX": "take one Cholesky factor, solve with it, and add up the logarithms of its diagonal",
}
POINTS, FEATURES, WIDTH, LATENT = by_device(4096, 640), 16, by_device(512, 128), 8


class Kernel(nn.Module):
    """A radial kernel on learned features."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.last = nn.Linear(WIDTH, LATENT)
        self.log_noise = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x):
        z = self.last(self.net(x))
        squares = z.square().sum(-1)
        far = squares[:, None] + squares - 2 * z @ z.T
        noise = self.log_noise.exp() + 1e-3
        return torch.exp(-0.5 * far.clamp_min(0)) + torch.diag(noise.expand(len(x)))


def by_the_book(k, y):
    fit = y @ torch.linalg.inv(k) @ y  # guilty
    return 0.5 * (fit + torch.logdet(k) + len(y) * math.log(2 * math.pi)) / len(y)


def by_cholesky(k, y):
    factor = torch.linalg.cholesky(k)
    white = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
    half_logdet = factor.diagonal().log().sum()
    return (0.5 * white.square().sum() + half_logdet) / len(y) + 0.5 * math.log(2 * math.pi)


def prepare(likelihood):
    model = Kernel().to(device())
    optimizer = adamw(model)

    def draw():
        x = torch.randn(POINTS, FEATURES, device=device())
        return x, torch.sin(x[:, 0]) + 0.1 * torch.randn(POINTS, device=device())

    data = in_turn(draw)

    def step():
        x, y = next(data)
        loss = likelihood(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def faulty():
    return prepare(by_the_book)


def clean():
    return prepare(by_cholesky)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
