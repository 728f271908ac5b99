"""Two steps that draw at random, compared draw by draw or by their statistics."""

import math

import torch

from steplab.core import RunSpec
from steplab.step.assemble import assemble
from steplab.verify.draws import MAX_DEVIATION, OWN_ROWS, check_draws, take_draws
from steplab.verify.numerics import NumericsSnapshot
from tests.own_models import named

VIEWS = """
import torch, steplab
from torch import nn

def make():
    def batches(size):
        while True:
            ids = torch.randn(size, 9)
            windows = torch.randn(size + 7).unfold(0, 8, 1)
            yield {"x": ids[:, :-1], "y": ids[:, 1:], "scale": torch.rand(size, 1).expand(size, 8),
                   "windows": windows}

    def loss(model, b):
        return (model(b["x"] * b["scale"] + b["windows"]) - b["y"]).square().mean()

    return steplab.UserModel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), batches, loss)
"""


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


def test_a_batch_of_equal_rows_is_laid_out_as_the_users(tmp_path):
    """Else compiled code would be compiled again, and the user told that his batches changed."""
    (tmp_path / "own.py").write_text(VIEWS)
    spec = RunSpec(named(f"{tmp_path / 'own.py'}:make"), {}, batch=4, mode="full")
    step, seen = assemble(spec), []
    forward = step.forward
    step.forward = lambda model, batch: seen.append(batch) or forward(model, batch)
    take_draws(step, spec)
    equal = [batch for batch in seen if all((part == part[:1]).all() for part in batch.values())]
    assert 0 < len(equal) < len(seen)
    strides = [{name: part.stride() for name, part in batch.items()} for batch in (*seen, *equal)]
    overlapping = [found.pop("windows") for found in strides]
    assert all(found == {"x": (9, 1), "y": (9, 1), "scale": (1, 0)} for found in strides)
    assert set(overlapping) == {(1, 1), (8, 1)}, "windows share their numbers; equal rows cannot"
