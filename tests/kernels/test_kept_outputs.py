"""What an op keeps for its backward has no gradient: nothing of that size is filled with zeros."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steplab.kernels import attention, cross_entropy


class Zeros(TorchDispatchMode):
    """Notes the shapes that are made of zeros."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.zeros, torch.ops.aten.zeros_like):
            self.shapes.append(tuple(out.shape))
        return out


def loss(reduction):
    x, weight = (torch.randn(n, 8, requires_grad=True) for n in (12, 20))
    targets = torch.arange(12)
    return cross_entropy.cross_entropy("chunked", x, weight, targets, reduction=reduction).sum()


def mixed():
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    return attention.attention("tiled", q, k, v, True).sum()


@pytest.mark.parametrize("op", [lambda: loss("mean"), lambda: loss("none"), mixed])
def test_nothing_is_filled_with_zeros_for_what_is_kept(op):
    out = op()
    with Zeros() as zeros:
        out.backward()
    assert zeros.shapes == []


@pytest.mark.parametrize("op", [lambda: loss("mean"), lambda: loss("none"), mixed])
def test_a_gradient_that_nobody_sent_is_none(op):
    out = op()
    (dout,) = torch.autograd.grad(Silent.apply(out), out, allow_unused=True)
    assert dout is None
    Silent.apply(op()).backward()  # and none is passed on


class Silent(torch.autograd.Function):
    """Sends no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_out):
        return None
