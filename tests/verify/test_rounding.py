"""Rounded products and streams: what a precision cannot avoid, and nothing else."""

import pytest
import torch

from steplab.step.assemble import assemble, micro_batches
from steplab.verify.numerics import unit_roundoff
from steplab.verify.rounding import RoundedProducts, RoundedStream, min_factor_ndim, rounded


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


def test_a_stream_of_16_bits_is_rounded_between_products_but_no_loss_and_no_update(tiny_spec):
    spec = tiny_spec()
    step = assemble(spec)
    step.model.double()
    seen = []
    step.model.embedding.register_forward_hook(lambda module, args, x: seen.append(x.detach()))
    fine = torch.full((4, 4), 1 + 2**-20, dtype=torch.float64)
    with RoundedStream("bf16", torch.float64, step):
        output = step(next(micro_batches(step, spec)))
        afterwards = fine * fine
    assert torch.equal(seen[0], rounded(seen[0], 8))
    assert not torch.equal(output.loss, rounded(output.loss, 8))
    assert not torch.equal(afterwards, rounded(afterwards, 8))


def test_the_sums_that_attention_hands_on_are_no_factors():
    assert min_factor_ndim("aten::_scaled_dot_product_flash_attention_for_cpu") == 4
    assert min_factor_ndim("aten::mm") == 1
    assert min_factor_ndim("aten::add") is None
