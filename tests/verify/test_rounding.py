"""Rounded products: what a precision cannot avoid, and nothing else."""

import pytest
import torch

from steplab.verify.numerics import unit_roundoff
from steplab.verify.references import RoundedProducts, min_factor_ndim, rounded


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.bfloat16), (11, torch.float16)])
def test_rounding_is_that_of_the_dtype(bits, dtype):
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rounded(x, bits), x.to(dtype).double(), rtol=0, atol=0)


def test_tf32_has_ten_bits_behind_the_point():
    assert rounded(torch.tensor([1 + 2.0**-10 + 2.0**-12], dtype=torch.float64), 11) == 1 + 2.0**-10
    assert unit_roundoff("tf32") == 2.0**-11 and unit_roundoff("fp32") == 2.0**-24


def test_products_are_rounded_forward_and_backward_and_nothing_else():
    source = torch.Generator().manual_seed(0)
    x, w = (torch.randn(16, 16, generator=source, dtype=torch.float64) for _ in range(2))
    w.requires_grad_()
    with RoundedProducts("bf16"):
        y = x @ w
        (y.exp() * 1e-3).sum().backward()
    coarse = rounded(rounded(x, 8) @ rounded(w.detach(), 8), 8)
    torch.testing.assert_close(y, coarse, rtol=0, atol=0)
    gradient = rounded(rounded(x, 8).T @ rounded(coarse.exp() * 1e-3, 8), 8)
    torch.testing.assert_close(w.grad, gradient, rtol=0, atol=0)


def test_the_sums_that_attention_hands_on_are_no_factors():
    assert min_factor_ndim("aten::_scaled_dot_product_flash_attention_for_cpu") == 4
    assert min_factor_ndim("aten::mm") == 1
    assert min_factor_ndim("aten::add") is None
