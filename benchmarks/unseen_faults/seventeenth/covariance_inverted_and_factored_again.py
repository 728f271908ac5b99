"""A Gaussian process over learned features is fitted to measurements. Its likelihood is written as in the
textbook: with the inverse of the covariance for one term and its log-determinant for the other, so the
matrix is factored twice by LU and inverted. One Cholesky factor gives both terms.
A good finding names the inverse or the log-determinant of the covariance and one of these lines.
"""

import math

import torch
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the likelihood inverts the covariance and computes its log-determinant by itself",
    "FIX": "factor it once by torch.linalg.cholesky_ex and use cholesky_solve and the factor's diagonal",
}
POINTS, INPUTS, FEATURES = by_device(4096, 640), 32, 16
WIDTH, LAYERS = by_device(2048, 64), 3


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(INPUTS, WIDTH), nn.GELU()]
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
        self.body = nn.Sequential(*layers, nn.Linear(WIDTH, FEATURES))
        self.log_noise = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x):
        return self.body(x)


def covariance(features, log_noise):
    squares = features.square().sum(1)
    apart = squares[:, None] + squares - 2 * features @ features.T
    return torch.exp(-0.5 * apart) + torch.diag_embed(log_noise.exp().expand(len(features)))


def textbook(matrix, y):
    fit = y @ torch.linalg.inv(matrix) @ y  # guilty
    return fit, torch.logdet(matrix)


def by_cholesky(matrix, y):
    factor, _ = torch.linalg.cholesky_ex(matrix)
    fit = y @ torch.cholesky_solve(y[:, None], factor)[:, 0]
    return fit, 2 * factor.diagonal().log().sum()


def build(terms):
    model = Features().to(device())
    optimizer = adamw(model)

    def measurements():
        x = torch.randn(POINTS, INPUTS, device=device())
        return x, torch.sin(x.sum(1)) + 0.1 * torch.randn(POINTS, device=device())

    data = in_turn(measurements)

    def step():
        x, y = next(data)
        with mixed():
            features = model(x)
        fit, volume = terms(covariance(features.float(), model.log_noise), y)
        loss = 0.5 * (fit + volume) / POINTS + 0.5 * math.log(2 * math.pi)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(textbook)


def clean():
    return build(by_cholesky)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
