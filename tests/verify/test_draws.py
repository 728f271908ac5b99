"""Statistics over draws: what is no number is never close."""

import math

import torch

from steplab.verify.draws import MAX_DEVIATION, check_draws
from steplab.verify.numerics import NumericsSnapshot


def snapshot(loss, gradient):
    return NumericsSnapshot({"draws": {"loss": loss, "w": gradient}}, {}, "fp32", 1, 0.0)


def test_a_gradient_that_is_not_finite_is_red_and_named():
    torch.manual_seed(0)
    loss, gradient = torch.randn(32, 1).double(), torch.randn(32, 8).double()
    assert check_draws(snapshot(loss, gradient), snapshot(loss, gradient)).excess <= 1
    broken = gradient.clone()
    broken[3, 2] = math.nan
    found = check_draws(snapshot(loss, broken), snapshot(loss, gradient))
    assert not found.passed and "the gradient of w" in found.detail
    assert f"at most {MAX_DEVIATION:g}" in found.detail
