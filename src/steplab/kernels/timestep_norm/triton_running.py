"""The timestep norm in Triton: the sums along time within the kernels that norm, in fp64.

Chunks of time are summed up first; then each finds the sums before it. Saved for the backward:
the input, and mean and deviation per token and group. torch.compile sees opaque ops.
"""

# B batch, L tokens, D width, G groups
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels._triton import DTYPES, refuse_batch, refuse_device
from steplab.kernels.timestep_norm._statistics import Affine, Statistics

WIDEST = 512  # channels of a group: 4 tokens of it in the registers of one program
NEEDS_GPU = True


def refuse(
    x_BLD: Tensor, affine: Affine, before: Statistics | None, valid_BL: Tensor | None
) -> str:
    """Return why it cannot run, or ""."""
    for tensor in (x_BLD, affine.weight_D, affine.bias_D):
        if tensor.dtype not in DTYPES:
            return f"needs fp16, bf16 or fp32, not {tensor.dtype}"
    if before is not None and before.mean_BG.dtype != torch.float32:
        return f"needs statistics in fp32, not {before.mean_BG.dtype}"
    if valid_BL is not None:
        return "takes no tokens that are not valid"
    if x_BLD.shape[-1] > WIDEST * affine.groups:
        return f"needs groups of at most {WIDEST} channels"
    return refuse_batch(x_BLD) or refuse_device(x_BLD)


def timestep_norm(
    x_BLD: Tensor,
    affine: Affine,
    before: Statistics | None,
    valid_BL: Tensor | None,
    keeps: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Statistics | None]:
    """Return the normed tokens and, if `keeps`, the statistics behind the last one."""
    prior = (None, None, None) if before is None else before
    y_BLD, mean_BG, variance_BG, *_ = _forward(x_BLD, *affine, *prior, keeps, dtype)
    if not keeps:
        return y_BLD, None
    B, L, _ = x_BLD.shape
    if before is None:
        count_B = torch.full((B,), L, dtype=torch.int64, device=x_BLD.device)
    else:
        count_B = before.count_B + L
    return y_BLD, Statistics(count_B, mean_BG, variance_BG)


@torch.library.custom_op("steplab::timestep_norm", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    count: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    keeps: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, the last mean and variance (empty unless kept), each token's mean and 1 / std."""
    from steplab.kernels.timestep_norm import _triton_launch

    prior = None
    if count is not None and mean is not None and variance is not None:
        prior = (count.contiguous(), mean.contiguous(), variance.contiguous())
    affine = (weight.contiguous(), bias.contiguous(), groups, eps)
    return _triton_launch.forward(x.contiguous(), affine, prior, keeps, dtype)


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, *rest: Any
) -> tuple[Tensor, ...]:
    keeps, dtype = rest[-2:]
    return empty_outputs(x, groups, keeps, dtype)


def empty_outputs(
    x_BLD: Tensor, groups: int, keeps: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `_forward` returns, without content."""
    B, L, D = x_BLD.shape
    last = [x_BLD.new_empty(B if keeps else 0, groups, dtype=torch.float32) for _ in range(2)]
    each = [x_BLD.new_empty(B, L, groups, dtype=torch.float32) for _ in range(2)]
    return x_BLD.new_empty(B, L, D, dtype=dtype), last[0], last[1], each[0], each[1]


@torch.library.custom_op("steplab::timestep_norm_backward", mutates_args=())
def _backward(
    dy: Tensor,
    d_mean: Tensor | None,
    d_variance: Tensor | None,
    x: Tensor,
    weight: Tensor,
    means: Tensor,
    rstds: Tensor,
    count: Tensor | None,
    mean: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, bias, and of the mean and variance before (or empty)."""
    from steplab.kernels.timestep_norm import _triton_launch

    last = None
    if d_mean is not None or d_variance is not None:
        given = [d for d in (d_mean, d_variance) if d is not None]
        none = torch.zeros_like(given[0])
        last = tuple(none if d is None else d.contiguous() for d in (d_mean, d_variance))
    kept = (x.contiguous(), weight.contiguous(), means, rstds)
    prior = None if count is None or mean is None else (count.contiguous(), mean.contiguous())
    return _triton_launch.backward(dy.contiguous(), last, kept, prior)


@_backward.register_fake
def _(dy: Tensor, d_mean: Any, d_variance: Any, *kept: Any) -> tuple[Tensor, ...]:
    x, weight, means, _, count, _ = kept
    prior = means.new_empty(0 if count is None else x.shape[0], means.shape[2])
    weights = weight.new_empty(weight.shape), weight.new_empty(weight.shape)
    return x.new_empty(x.shape), *weights, prior, prior.new_empty(prior.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, _, count, mean, _, keeps, _ = inputs
    ctx.keeps, ctx.has_prior, ctx.bias_dtype = keeps, count is not None, bias.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[3:])
    ctx.save_for_backward(x, weight, *output[3:], count, mean)


def _differentiate(ctx: Any, dy: Tensor | None, *gradients: Tensor | None) -> tuple[Any, ...]:
    d_mean, d_variance = gradients[:2] if ctx.keeps else (None, None)
    x, weight, means, rstds, count, mean = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x)
    found = _backward(dy, d_mean, d_variance, x, weight, means, rstds, count, mean)
    dx, d_weight, d_bias, *d_prior = found
    prior = (None, *d_prior) if ctx.has_prior else (None, None, None)
    return dx, d_weight, d_bias.to(ctx.bias_dtype), None, None, *prior, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
