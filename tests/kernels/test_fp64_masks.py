"""Attention in fp64 beside masks of every dtype, against softmax written out."""

import pytest
import torch
import torch.nn.functional as F

from steplab.kernels.fp64_masks import Fp64Masks

HIDDEN = {
    "bool": torch.ones(10, 10, dtype=torch.bool).tril(),
    "fp32": torch.full((10, 10), -torch.inf).triu(1),
    "fp64": torch.full((10, 10), -torch.inf, dtype=torch.float64).triu(1),
}


def by_position(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask)


def by_name(q, k, v, mask):
    return F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask)


@pytest.mark.parametrize("call", [by_position, by_name])
@pytest.mark.parametrize("kind", HIDDEN)
def test_values_and_gradients_are_those_of_softmax(kind, call):
    q, k, v = (torch.randn(2, 3, 10, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scores = (q @ k.mT / 8**0.5).masked_fill(~HIDDEN["bool"], -torch.inf)
    expected = scores.softmax(-1) @ v
    with Fp64Masks():
        found = call(q, k, v, HIDDEN[kind])
    torch.testing.assert_close(found, expected)
    gradients, truth = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (found, expected))
    torch.testing.assert_close(gradients, truth)


def test_other_dtypes_and_calls_without_a_mask_are_as_they_were():
    q = torch.randn(2, 3, 10, 8)
    for dtype, mask in (
        (torch.float32, HIDDEN["fp32"]),
        (torch.bfloat16, None),
        (torch.float64, None),
    ):
        plain = F.scaled_dot_product_attention(*[q.to(dtype)] * 3, attn_mask=mask)
        with Fp64Masks():
            found = F.scaled_dot_product_attention(*[q.to(dtype)] * 3, attn_mask=mask)
        assert torch.equal(found, plain) and found.dtype == dtype
