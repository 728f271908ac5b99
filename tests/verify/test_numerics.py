"""A sketch stands for a tensor when distances are asked for."""

import math

import pytest
import torch

from steplab.verify.numerics import SKETCH_SIZE, distance, sketch


def test_small_tensors_are_kept_whole_and_are_copies():
    x = torch.randn(7, 9, dtype=torch.float64)
    kept = sketch(x)
    torch.testing.assert_close(kept, x.flatten())
    x += 1
    assert distance(kept, sketch(x)) == pytest.approx(math.sqrt(63))


@pytest.mark.parametrize("shape", [(SKETCH_SIZE + 1,), (300, 500)])
def test_the_norm_of_a_difference_is_estimated(shape):
    source = torch.Generator().manual_seed(0)
    a = torch.randn(shape, generator=source)
    b = a + 1e-4 * torch.randn(shape, generator=source)
    true = float((a.double() - b.double()).norm())
    # 1.1 % deviation for noise; five of them.
    assert distance(sketch(a), sketch(b)) == pytest.approx(true, rel=0.055)


def test_one_wrong_element_is_seen_exactly():
    a = torch.zeros(100_000)
    b = a.clone()
    b[77_777] = 3.0
    assert distance(sketch(a), sketch(b)) == pytest.approx(3.0)


def test_complex_numbers_keep_both_parts():
    x = torch.tensor([1 + 2j, 3 - 4j])
    torch.testing.assert_close(sketch(x), torch.tensor([1.0, 2.0, 3.0, -4.0], dtype=torch.float64))


def test_what_is_not_finite_is_infinitely_far():
    assert distance(sketch(torch.tensor([1.0, math.nan])), sketch(torch.zeros(2))) == math.inf
    assert distance(torch.zeros(2), torch.zeros(3)) == math.inf
