"""Two steps that draw at random, compared draw by draw or by their statistics."""

import math

import torch

from steplab.verify.draws import MAX_DEVIATION, OWN_ROWS, check_draws
from steplab.verify.numerics import NumericsSnapshot


def snapshot(loss, gradient):
    return NumericsSnapshot({OWN_ROWS: {"loss": loss, "w": gradient}}, {}, "fp32", 1, 0.0)


def test_a_gradient_that_is_not_finite_is_red_and_named():
    torch.manual_seed(0)
    loss, gradient = torch.randn(32, 1).double(), torch.randn(32, 8).double()
    assert check_draws(snapshot(loss, gradient), snapshot(loss, gradient)).excess <= 1
    broken = gradient.clone()
    broken[3, 2] = math.nan
    found = check_draws(snapshot(loss, broken), snapshot(loss, gradient))
    assert not found.passed and "the gradient of w" in found.detail
    assert f"at most {MAX_DEVIATION:g}" in found.detail


def test_gradients_are_compared_one_by_one_where_the_losses_are_alike():
    torch.manual_seed(0)
    loss, gradient = torch.randn(32, 1).double(), torch.randn(32, 8).double()
    other = gradient[torch.randperm(32)]  # of other draws: the same statistics
    plain = snapshot(loss, gradient)
    found = check_draws(snapshot(loss + 0.01 * torch.randn(32, 1), other), plain)
    assert not found.passed and "the same numbers are drawn for the loss" in found.detail
    assert check_draws(snapshot(loss.flip(0), other), plain).passed
