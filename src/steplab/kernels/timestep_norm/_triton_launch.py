"""Launches the Triton kernels of the timestep norm; all inputs are contiguous."""

# B batch, L tokens, D width, G groups, C chunks of time
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels.timestep_norm._triton_kernels import (
    timestep_gradient_kernel,
    timestep_norm_kernel,
    timestep_pulls_kernel,
    timestep_sums_kernel,
)
from steplab.kernels.timestep_norm.triton_running import empty_outputs

MOST_CHUNKS = 4 if INTERPRETED else 64  # whose sums every program adds up for itself
TILE = 32 if INTERPRETED else 2048  # numbers of a tile: 16 of each thread, which fit registers


class Cut:
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
        self.chunk_length = tokens * triton.cdiv(triton.cdiv(L, tokens), MOST_CHUNKS)
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


def forward(
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
    (B, L, _), cut = x_BLD.shape, Cut(x_BLD, groups)
    outputs = empty_outputs(x_BLD, groups, keeps, dtype)
    y_BLD, last_mean, last_variance, means, rstds = outputs
    totals_BC2G = x_BLD.new_empty(B, cut.chunks, 2, groups, dtype=torch.float64)
    with on_device_of(x_BLD):
        if cut.chunks > 1:
            timestep_sums_kernel[cut.grid](x_BLD, totals_BC2G, L, cut.chunk_length, **cut.options)
        timestep_norm_kernel[cut.grid](
            *(x_BLD, weight_D, bias_D, totals_BC2G, *(prior or (None, None, None))),
            *(y_BLD, means, rstds, last_mean, last_variance, L, cut.chunk_length, eps),
            **cut.options,
            CHUNKS=triton.next_power_of_2(cut.chunks),
            HAS_PRIOR=prior is not None,
            KEEPS=keeps,
            UPCAST=INTERPRETED,
        )
    return outputs


def backward(
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
    cut, dx_BLD = Cut(x_BLD, groups), torch.empty_like(x_BLD)
    totals_BC2G = x_BLD.new_empty(B, cut.chunks, 2, groups, dtype=torch.float64)
    partial_C2D = x_BLD.new_empty(B * cut.chunks, 2, D, dtype=torch.float32)
    inputs = (dy_BLD, *kept, None if prior is None else prior[0], *(last or (None, None)))
    flags = {"HAS_PRIOR": prior is not None, "HAS_LAST": last is not None}
    with on_device_of(x_BLD):
        timestep_pulls_kernel[cut.grid](
            *(*inputs, totals_BC2G, partial_C2D, L, cut.chunk_length), **cut.options, **flags
        )
        timestep_gradient_kernel[cut.grid](
            *(*inputs, totals_BC2G, dx_BLD, L, cut.chunk_length),
            **cut.options,
            **flags,
            CHUNKS=triton.next_power_of_2(cut.chunks),
            UPCAST=INTERPRETED,
        )
    d_weight, d_bias = partial_C2D.sum(0).to(weight_D.dtype).unbind(0)
    return dx_BLD, d_weight.clone(), d_bias.clone(), *_prior_gradients(totals_BC2G, prior)


def _prior_gradients(
    totals_BC2G: Tensor, prior: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """As many tokens as were counted had these moments."""
    if prior is None:
        empty = totals_BC2G.new_empty(0, totals_BC2G.shape[-1], dtype=torch.float32)
        return empty, empty.clone()
    count_B1, (first_BG, second_BG) = prior[0][:, None], totals_BC2G.sum(1).unbind(1)
    d_mean_BG = count_B1 * (first_BG + 2 * prior[1].double() * second_BG)
    return d_mean_BG.float(), (count_B1 * second_BG).float()
