"""A Gaussian likelihood is made from a covariance that is expanded to the batch, so the same matrix
is factored once per sample.
A good finding names the batched Cholesky factorization (with its backward), and the line that
makes the distribution.
"""

import steplab
import torch
from torch import nn
from torch.distributions import MultivariateNormal

from common import by_device, device, in_turn, mixed, my_turn

FAULT = {
    "KIND": "time",
    "STYLE": "factory",
    "BATCH": 1024,
    "CPU_BATCH": 256,
    "CAUSE": "one covariance matrix, expanded to the batch, is factored once per sample",
    "FIX": "factor it once and let the factor broadcast over the batch",
}
SIZE, WIDTH = by_device(128, 48), by_device(2048, 1024)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, SIZE),
        )
        self.mix = nn.Parameter(torch.eye(SIZE) + 0.01 * torch.ones(SIZE, SIZE))

    def forward(self, x):
        with mixed():
            mean = self.mean(x)
        covariance = self.mix @ self.mix.T + 0.1 * torch.eye(SIZE, device=x.device)
        return mean.float(), covariance


def per_sample(mean, covariance, y):
    covariances = covariance.expand(len(mean), SIZE, SIZE)
    return -MultivariateNormal(mean, covariances).log_prob(y).mean()  # guilty


def at_once(mean, covariance, y):
    factor = torch.linalg.cholesky(covariance)
    return -MultivariateNormal(mean, scale_tril=factor).log_prob(y).mean()


def build(likelihood):
    my_turn()

    def batches(size):
        return in_turn(
            lambda: (
                torch.randn(size, 64, device=device()),
                torch.randn(size, SIZE, device=device()),
            )
        )

    def loss(model, batch):
        x, y = batch
        return likelihood(*model(x), y)

    return steplab.UserModel(Model(), batches, loss, unit="samples")


def faulty():
    return build(per_sample)


def clean():
    return build(at_once)
