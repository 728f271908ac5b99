"""One pass in Triton over the wide rows: z is read once, and nothing wide is written twice.

An H200 moves 4.2 TB/s and issues 30 T instructions/s: to be bound by memory, a forward has at most
28 instructions per element in which to read and write 2 bytes each. So there is one exponential for
both the normal distribution and its density, and no division.
"""

# R rows, F inner width; in the kernels R rows of the tile, C columns of one step
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.activation import RowWeights
from steplab.kernels.triton_blocks import Tile, fit_tile, narrow
from steplab.kernels.triton_runtime import INTERPRETED, on_device_of, tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)
# The lower tail of the normal distribution at -|z| is exp(-z^2 / 2) t P(t), t = 1 / (1 + S |z|),
# with a relative error of 4.7e-6 down to |z| = 13, where the exponential leaves fp32. S and the six
# coefficients minimize the largest relative error.
S = tl.constexpr(0.31)
P0 = tl.constexpr(0.12386069)
P1 = tl.constexpr(0.12044134)
P2 = tl.constexpr(0.13342957)
P3 = tl.constexpr(0.01574505)
P4 = tl.constexpr(0.18045009)
P5 = tl.constexpr(-0.07392907)
# The fastest on an H200 over (131,072, 3072): 3.79 and 4.15 TB/s, where a copy reaches 4.14
# (`benchmarks/experts_kernels.py`).
FORWARD = Tile(1, 1024, 2)
BACKWARD = Tile(2, 512, 4)


# fmt: off
@triton.jit
def _reciprocal(x):
    """Return 1 / x for x > 0: one instruction and a product, where a division takes eight."""
    return tl.rsqrt(x * x)


@triton.jit
def _normal_tail(z):
    """Return the lower tail of the normal distribution at -|z|, and exp(-z^2 / 2)."""
    t = _reciprocal(tl.abs(z) * S + 1.0)
    bell = tl.exp2(z * z * (-0.5 * LOG2_E))
    polynomial = ((((t * P5 + P4) * t + P3) * t + P2) * t + P1) * t + P0
    return bell * t * polynomial, bell


@triton.jit
def gelu(z):
    """Return z times the normal distribution at z."""
    tail, _ = _normal_tail(z)
    return tl.maximum(z, 0.0) - tl.abs(z) * tail


@triton.jit
def gelu_and_slope(z):
    """Return gelu(z) and its derivative."""
    tail, bell = _normal_tail(z)
    away = tl.abs(z)
    below = tail - away * (bell * DENSITY_AT_0)  # the slope at -|z|
    return tl.maximum(z, 0.0) - away * tail, tl.where(z > 0, 1.0 - below, below)


@triton.jit
def _sigmoid(x):
    return _reciprocal(1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def _row_weights(values, source, row_R, inside_R):
    """Return the rows' weights in fp32, and the indices of their gradients."""
    index_R = row_R
    if source is not None:
        index_R = tl.load(source + row_R, mask=inside_R, other=0)
    return tl.load(values + index_R, mask=inside_R, other=0.0).to(tl.float32), index_R


@triton.jit
def activation_forward_kernel(
    z, values, source, h, R, WIDTH: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write one tile of h. Grid: tiles, those of the same rows one after another."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row_R = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column_C = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    inside_R = row_R < R
    inside_RC = inside_R[:, None]
    if WIDTH % COLUMNS:
        inside_RC = inside_RC & (column_C < WIDTH)[None, :]
    wide: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    z_RC = z + row_R.to(tl.int64)[:, None] * wide + column_C[None, :]
    first_RC = tl.load(z_RC, mask=inside_RC, other=0.0).to(tl.float32)
    if GATED:
        up_RC = tl.load(z_RC + WIDTH, mask=inside_RC, other=0.0).to(tl.float32)
        h_RC = first_RC * _sigmoid(first_RC) * up_RC
    else:
        h_RC = gelu(first_RC)
    if values is not None:
        weight_R, _ = _row_weights(values, source, row_R, inside_R)
        h_RC *= weight_R[:, None]
    target_RC = h + row_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
    tl.store(target_RC, narrow(h_RC, h.dtype.element_ty, UPCAST), mask=inside_RC)


@triton.jit
def activation_backward_kernel(
    z, dh, values, source, dz, dvalues, R, WIDTH: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write whole rows of dz, of h over those of dh, and the gradients of their weights."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < R
    weight_R = tl.full([ROWS], 1.0, tl.float32)
    index_R = row_R
    if values is not None:
        weight_R, index_R = _row_weights(values, source, row_R, inside_R)
    wide: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    dtype: tl.constexpr = dz.dtype.element_ty
    dot_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
    for column in tl.range(0, WIDTH, COLUMNS):
        column_C = column + tl.arange(0, COLUMNS)
        inside_RC = inside_R[:, None]
        if WIDTH % COLUMNS:
            inside_RC = inside_RC & (column_C < WIDTH)[None, :]
        wide_RC = row_R.to(tl.int64)[:, None] * wide + column_C[None, :]
        dh_RC = dh + row_R.to(tl.int64)[:, None] * WIDTH + column_C[None, :]
        first_RC = tl.load(z + wide_RC, mask=inside_RC, other=0.0).to(tl.float32)
        slope_RC = tl.load(dh_RC, mask=inside_RC, other=0.0).to(tl.float32)
        weighted_RC = slope_RC * weight_R[:, None]
        if GATED:
            up_RC = tl.load(z + wide_RC + WIDTH, mask=inside_RC, other=0.0).to(tl.float32)
            open_RC = _sigmoid(first_RC)
            silu_RC = first_RC * open_RC
            h_RC = silu_RC * up_RC
            dfirst_RC = weighted_RC * up_RC * (open_RC + silu_RC * (1.0 - open_RC))
            dup_RC = narrow(weighted_RC * silu_RC, dtype, UPCAST)
            tl.store(dz + wide_RC + WIDTH, dup_RC, mask=inside_RC)
        else:
            h_RC, rise_RC = gelu_and_slope(first_RC)
            dfirst_RC = weighted_RC * rise_RC
        tl.store(dz + wide_RC, narrow(dfirst_RC, dtype, UPCAST), mask=inside_RC)
        tl.store(dh_RC, narrow(h_RC * weight_R[:, None], dtype, UPCAST), mask=inside_RC)
        if dvalues is not None:
            dot_RC += slope_RC * h_RC
    if dvalues is not None:
        tl.store(dvalues + index_R, tl.sum(dot_RC, 1), mask=inside_R)
# fmt: on


def forward(
    z: Tensor, activation: str, weights: RowWeights | None = None, tile: Tile = FORWARD
) -> Tensor:
    """Return (R, F)."""
    gated = activation == "swiglu"
    R, F = z.shape[0], z.shape[1] // 2 if gated else z.shape[1]
    tile = fit_tile(tile, F)
    h_RF = z.new_empty(R, F)
    tiles = -(-R // tile.rows) * -(-F // tile.columns)
    with on_device_of(z):
        activation_forward_kernel[(tiles,)](
            z, *_pointers(weights), h_RF, R, F, gated, tile.rows, tile.columns,
            UPCAST=INTERPRETED, num_warps=tile.warps,
        )  # fmt: skip
    return h_RF


def backward(
    z: Tensor,
    dh_RF: Tensor,
    activation: str,
    weights: RowWeights | None = None,
    tile: Tile = BACKWARD,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dz, the weighted activation (written over `dh`) and the gradient of the weights."""
    (R, F), dz, dvalues_R = dh_RF.shape, torch.empty_like(z), None
    tile = fit_tile(tile, F)
    if weights is not None:
        dvalues_R = z.new_empty(R, dtype=torch.float32)
    with on_device_of(z):
        activation_backward_kernel[(-(-R // tile.rows),)](
            z, dh_RF, *_pointers(weights), dz, dvalues_R, R, F, activation == "swiglu", tile.rows,
            tile.columns, UPCAST=INTERPRETED, num_warps=tile.warps,
        )  # fmt: skip
    return dz, dh_RF, dvalues_R


def _pointers(weights: RowWeights | None) -> tuple[Tensor | None, Tensor | None]:
    if weights is None:
        return None, None
    return weights.values_R.contiguous(), weights.source_R
