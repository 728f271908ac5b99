"""An explicit inverse: steplab profile examples/faults/explicit_inverse.py:faulty

A Gaussian process on learned features: its likelihood needs the solution of one system with the
covariance of the points. The clean twin solves it; the faulty one inverts the covariance first.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "explicit_inverse"
where = "cpu"

POINTS, FEATURES = 384, 16


def process(inverts: bool) -> steplab.UserModel:
    """Learn features in which near points have near values."""

    def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            x_BNF = torch.randn(size, POINTS, FEATURES)
            yield x_BNF, x_BNF[..., :1].sin()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x_BNF, y_BN1 = batch
        z_BNF = model(x_BNF)
        k_BNN = z_BNF @ z_BNF.mT + torch.eye(POINTS)
        solved_BN1 = (
            torch.linalg.inv(k_BNN) @ y_BN1 if inverts else torch.linalg.solve(k_BNN, y_BN1)
        )
        return (y_BN1 * solved_BN1).mean()

    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, FEATURES))
    return steplab.UserModel(model, batches, loss, POINTS, unit="points")


def faulty() -> steplab.UserModel:
    """Inverts, and multiplies."""
    return process(inverts=True)


def clean() -> steplab.UserModel:
    """Solves."""
    return process(inverts=False)
