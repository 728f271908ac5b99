"""Addition and norm in one kernel; in the backward, both gradients of the stream in one.

Saved for the backward: the stream and one number per row. torch.compile sees opaque ops.
"""

# D width
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels._triton import DTYPES, refuse_device

WIDEST = 8192  # a row stays in registers: 16 numbers in each of 512 threads
NEEDS_GPU = True


def refuse(x: Tensor, weight_D: Tensor, added: Tensor | None = None) -> str:
    """Return why it cannot run, or ""."""
    for tensor in (x, weight_D, *(() if added is None else (added,))):
        if tensor.dtype not in DTYPES:
            return f"needs fp16, bf16 or fp32, not {tensor.dtype}"
    if weight_D.shape != x.shape[-1:] or (added is not None and added.shape != x.shape):
        return "needs a weight as wide as the rows, and an addition of their shape"
    if x.shape[-1] > WIDEST:
        return f"needs rows of at most {WIDEST} numbers, not {x.shape[-1]}"
    return refuse_device(x)


def rms_norm(
    x: Tensor,
    weight_D: Tensor,
    eps: float,
    added: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (normed, stream)."""
    out: tuple[Tensor, Tensor] = _AddAndNorm.apply(x, weight_D, eps, added, dtype)
    return out


class _AddAndNorm(torch.autograd.Function):
    """The stream passes through, so that all of its gradient arrives in one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_D: Tensor,
        eps: float,
        added: Tensor | None,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        if added is None:
            stream = x
            normed, rstd = _norm(x, weight_D, eps, dtype or x.dtype)
        else:
            normed, stream, rstd = _add_and_norm(x, added, weight_D, eps, dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(stream, weight_D, rstd)
        ctx.dtypes = (x.dtype, None if added is None else added.dtype)
        return normed, stream

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_normed, d_stream = gradients
        stream, weight_D, rstd = ctx.saved_tensors
        dweight_D = None
        if d_normed is not None:
            d_stream, dweight_D = _backward(d_normed, d_stream, stream, weight_D, rstd)
        dx, d_added = (
            d_stream if d_stream is None or dtype is None else d_stream.to(dtype)
            for dtype in ctx.dtypes
        )
        return dx, dweight_D, None, None if ctx.dtypes[1] is None else d_added, None


@torch.library.custom_op("steplab::rms_norm", mutates_args=())
def _norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from steplab.kernels.rms_norm import _triton_launch

    normed, _, rstd = _triton_launch.forward(x, None, weight_D, eps, dtype)
    return normed, rstd


@torch.library.custom_op("steplab::add_rms_norm", mutates_args=())
def _add_and_norm(
    x: Tensor, added: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    from steplab.kernels.rms_norm import _triton_launch

    return _triton_launch.forward(x, added, weight_D, eps, dtype)


@torch.library.custom_op("steplab::rms_norm_backward", mutates_args=())
def _backward(
    d_normed: Tensor, d_stream: Tensor | None, stream: Tensor, weight_D: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    from steplab.kernels.rms_norm import _triton_launch

    return _triton_launch.backward(d_normed, d_stream, stream, weight_D, rstd)


def empty_outputs(
    x: Tensor, added: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed, stream and 1 / root-mean-square (..., in fp32) without content.

    Without `added` there is no new stream, and the second is `x`.
    """
    stream = x
    if added is not None:
        stream = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, added.dtype))
    normed = x.new_empty(x.shape, dtype=dtype or stream.dtype)
    return normed, stream, x.new_empty(x.shape[:-1], dtype=torch.float32)


@_norm.register_fake
def _(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    normed, _, rstd = empty_outputs(x, None, dtype)
    return normed, rstd


@_add_and_norm.register_fake
def _(
    x: Tensor, added: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_outputs(x, added, dtype)


@_backward.register_fake
def _(
    d_normed: Tensor, d_stream: Tensor | None, stream: Tensor, weight_D: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return stream.new_empty(stream.shape), weight_D.new_empty(weight_D.shape)
