"""A card to compute on: its kernels take wall time and hardly any of the host's.

Two ranks that compute on the two cores of a small machine take them from each other and from gloo,
so that nothing can overlap and no rank is on time. A step whose kernels wait is one of two machines
with a card each; its operators, ranges and collectives are recorded as always.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def _lasting(ms: float) -> Iterator[None]:
    end = time.perf_counter() + ms / 1e3
    yield
    time.sleep(max(0.0, end - time.perf_counter()))


@torch.library.custom_op("card::linear", mutates_args=())
def linear(x_ND: Tensor, w_DF: Tensor, ms: float) -> Tensor:
    """Return (N, F) after `ms`."""
    with _lasting(ms):
        return x_ND @ w_DF


@torch.library.custom_op("card::linear_backward", mutates_args=())
def linear_backward(
    grad_NF: Tensor, x_ND: Tensor, w_DF: Tensor, ms: float
) -> tuple[Tensor, Tensor]:
    """Return (N, D) and (D, F) after `ms`."""
    with _lasting(ms):
        return grad_NF @ w_DF.T, x_ND.T @ grad_NF


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.ms = inputs[2]


def _backward(ctx, grad_NF: Tensor) -> tuple[Tensor, Tensor, None]:
    return *linear_backward(grad_NF.contiguous(), *ctx.saved_tensors, ctx.ms), None


linear.register_autograd(_backward, setup_context=_keep)


class Layer(nn.Module):
    """A linear layer whose forward takes `ms`, and whose backward does again."""

    def __init__(self, width: int, ms: float) -> None:
        super().__init__()
        self.w_DD = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.ms = ms

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        return linear(x_ND, self.w_DD, self.ms)
