"""The timestep norm in Triton, with the sums along time inside the kernels that norm, in fp64.

Chunks of time are summed up first; then each finds the sums before it. Saved for the backward:
the input, and mean and deviation per token and group. torch.compile sees opaque ops.
"""

# B batch, L tokens, D width, G groups, C chunks of time
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steplab.kernels.timestep_norm import Affine, Statistics
from steplab.kernels.timestep_norm._running_kernels import (
    timestep_gradient_kernel,
    timestep_gradient_sums_kernel,
    timestep_norm_kernel,
    timestep_sums_kernel,
)
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    on_device_of,
    refuse_batch,
    refuse_device,
    refuse_dtype,
    triton,
)

NEEDS_GPU = True
MAX_WIDTH = 512  # channels of a group, 4 tokens of which fit into the registers of one program
MAX_CHUNKS = 4 if INTERPRETED else 64  # every program adds up the sums of all chunks itself
TILE = 32 if INTERPRETED else 2048  # elements of a tile: 16 of each thread, which fit registers


class Tiling:
    """How time and width are cut for kernels whose grid is groups, chunks, batch."""

    def __init__(self, x_BLD: Tensor, groups: int) -> None:
        B, L, D = x_BLD.shape
        width = D // groups
        padded = triton.next_power_of_2(width)
        # 128 channels are 256 bytes of a row in bf16.
        side_by_side = max(1, min(triton.next_power_of_2(groups), 128 // padded))
        if INTERPRETED:
            side_by_side = min(side_by_side, 2)
        tokens = max(1, TILE // (padded * side_by_side))
        tokens = min(tokens, max(16, triton.next_power_of_2(L)))
        self.chunk_length = tokens * triton.cdiv(triton.cdiv(L, tokens), MAX_CHUNKS)
        self.chunks = triton.cdiv(L, self.chunk_length)
        self.grid = (triton.cdiv(groups, side_by_side), self.chunks, B)
        self.options: Mapping[str, Any] = {
            "D": D,
            "GROUPS": groups,
            "WIDTH": width,
            "T": tokens,
            "G": side_by_side,
            "S": padded,
            "num_warps": 4,
        }


def launch_forward(
    x_BLD: Tensor,
    affine: tuple[Tensor, Tensor, int, float],
    prior: tuple[Tensor, Tensor, Tensor] | None,
    keeps: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, the last mean and variance (empty unless kept), each token's mean and 1 / std.

    `affine` is weight, bias, groups and eps; `prior` count, mean and variance of earlier tokens.
    """
    weight_D, bias_D, groups, eps = affine
    (B, L, _), tiling = x_BLD.shape, Tiling(x_BLD, groups)
    outputs = empty_outputs(x_BLD, groups, keeps, dtype)
    y_BLD, last_mean, last_variance, means, rstds = outputs
    totals_BC2G = x_BLD.new_empty(B, tiling.chunks, 2, groups, dtype=torch.float64)
    with on_device_of(x_BLD):
        if tiling.chunks > 1:
            timestep_sums_kernel[tiling.grid](
                x_BLD, totals_BC2G, L, tiling.chunk_length, **tiling.options
            )
        timestep_norm_kernel[tiling.grid](
            x_BLD, weight_D, bias_D, totals_BC2G, *(prior or (None, None, None)), y_BLD, means,
            rstds, last_mean, last_variance, L, tiling.chunk_length, eps, **tiling.options,
            CHUNKS=triton.next_power_of_2(tiling.chunks), HAS_PRIOR=prior is not None,
            KEEPS=keeps, UPCAST=INTERPRETED,
        )  # fmt: skip
    return outputs


def launch_backward(
    dy_BLD: Tensor,
    last: tuple[Tensor, ...] | None,
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    prior: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, bias, and of the prior mean and variance (or empty).

    `last` are the gradients of the last mean and variance; `kept` is x, weight, means and 1 / stds;
    `prior` count and mean.
    """
    x_BLD, weight_D, means, _ = kept
    (B, L, D), groups = x_BLD.shape, means.shape[2]
    tiling, dx_BLD = Tiling(x_BLD, groups), torch.empty_like(x_BLD)
    totals_BC2G = x_BLD.new_empty(B, tiling.chunks, 2, groups, dtype=torch.float64)
    partial_C2D = x_BLD.new_empty(B * tiling.chunks, 2, D, dtype=torch.float32)
    inputs = (dy_BLD, *kept, None if prior is None else prior[0], *(last or (None, None)))
    flags = {"HAS_PRIOR": prior is not None, "HAS_LAST": last is not None}
    with on_device_of(x_BLD):
        timestep_gradient_sums_kernel[tiling.grid](
            *inputs, totals_BC2G, partial_C2D, L, tiling.chunk_length, **tiling.options, **flags
        )
        timestep_gradient_kernel[tiling.grid](
            *inputs, totals_BC2G, dx_BLD, L, tiling.chunk_length, **tiling.options, **flags,
            CHUNKS=triton.next_power_of_2(tiling.chunks), UPCAST=INTERPRETED,
        )  # fmt: skip
    d_weight, d_bias = partial_C2D.sum(0).to(weight_D.dtype).unbind(0)
    return dx_BLD, d_weight.clone(), d_bias.clone(), *_prior_gradients(totals_BC2G, prior)


def _prior_gradients(
    totals_BC2G: Tensor, prior: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the prior mean and variance: each counted token had these moments."""
    if prior is None:
        empty = totals_BC2G.new_empty(0, totals_BC2G.shape[-1], dtype=torch.float32)
        return empty, empty.clone()
    count_B1, (first_BG, second_BG) = prior[0][:, None], totals_BC2G.sum(1).unbind(1)
    d_mean_BG = count_B1 * (first_BG + 2 * prior[1].double() * second_BG)
    return d_mean_BG.float(), (count_B1 * second_BG).float()


def refuse(
    x_BLD: Tensor, affine: Affine, before: Statistics | None, valid_BL: Tensor | None
) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_dtype(x_BLD, affine.weight_D, affine.bias_D)
    if reason:
        return reason
    if before is not None and before.mean_BG.dtype != torch.float32:
        return f"needs statistics in fp32, not {before.mean_BG.dtype}"
    if valid_BL is not None:
        return "takes no invalid tokens"
    if x_BLD.shape[-1] > MAX_WIDTH * affine.groups:
        return f"needs groups of at most {MAX_WIDTH} channels"
    return refuse_batch(x_BLD) or refuse_device(x_BLD)


def timestep_norm(
    x_BLD: Tensor,
    affine: Affine,
    before: Statistics | None,
    valid_BL: Tensor | None,
    keeps: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Statistics | None]:
    """Return the normed tokens and, if `keeps`, the statistics after the last one."""
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
    prior = None
    if count is not None and mean is not None and variance is not None:
        prior = (count.contiguous(), mean.contiguous(), variance.contiguous())
    affine = (weight.contiguous(), bias.contiguous(), groups, eps)
    return launch_forward(x.contiguous(), affine, prior, keeps, dtype)


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, *rest: Any
) -> tuple[Tensor, ...]:
    keeps, dtype = rest[-2:]
    return empty_outputs(x, groups, keeps, dtype)


def empty_outputs(
    x_BLD: Tensor, groups: int, keeps: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `_forward` returns, uninitialized."""
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
    last = None
    if d_mean is not None or d_variance is not None:
        given = [d for d in (d_mean, d_variance) if d is not None]
        none = torch.zeros_like(given[0])
        last = tuple(none if d is None else d.contiguous() for d in (d_mean, d_variance))
    kept = (x.contiguous(), weight.contiguous(), means, rstds)
    prior = None if count is None or mean is None else (count.contiguous(), mean.contiguous())
    return launch_backward(dy.contiguous(), last, kept, prior)


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
