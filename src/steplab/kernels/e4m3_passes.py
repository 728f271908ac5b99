"""The passes around products in e4m3: each reads a tensor once and writes it rounded.

Rows that a product sums along keep their order; those that a weight gradient sums over are written
transposed as well, because the units take both factors along the sum only. In bf16 they run in
Triton where it runs; else, and in fp64, in torch, which is the definition.
"""

# T tokens, R rows (of tokens, or of their assignments in groups), D width, F inner width, E groups
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steplab.kernels.activation import RowWeights
from steplab.kernels.activation.reference import activate, slope
from steplab.kernels.e4m3 import (
    E4M3,
    E4M3_MAX,
    LARGEST_PRODUCT,
    LEAST_PRODUCT,
    PRODUCT_SLACK,
    STEEPEST,
    Rounded,
    Rows,
    balanced_scales,
    is_counting,
    quantize,
    scale_for,
    to_e4m3,
)
from steplab.kernels.e4m3_kernels import (
    activate_e4m3_kernel,
    gradient_scales_kernel,
    quantize_columns_kernel,
    quantize_rows_kernel,
    slopes_e4m3_kernel,
    transpose_rows_kernel,
)
from steplab.kernels.triton_blocks import Tile, column_block, fit_tile
from steplab.kernels.triton_runtime import INTERPRETED, on_device_of, triton, use_triton

MULTIPLE = 16  # of widths and of the rows in a group, which the units need
MOST_COLUMNS = 16_384  # of a row that is read as a whole
ELEMENTS = 4096  # of whole rows that a program reads
# Tiles: the faster of two or three on an H200, over 131,072 rows of 768 and of 3,072.
COLUMNS = Tile(128, 32, 4)
ACTIVATE = Tile(2, 1024, 4)
SLOPES = Tile(8, 32, 1) if INTERPRETED else Tile(64, 64, 4)
TRANSPOSE = Tile(8, 32, 1) if INTERPRETED else Tile(64, 64, 4)
STAGES = 3  # tiles on their way in a loop, the one that is computed included
SCALES = 256


class Slopes(NamedTuple):
    """What the backward of the activation writes."""

    dz: Rounded
    dz_FR: Tensor  # e4m3, for the gradient of the first matrix
    h_FR: Tensor  # e4m3: the weighted activation again, for that of the second
    dweights: Tensor | None  # fp32 or better, in the order of the weights


class GradientScales(NamedTuple):
    """The scales of the factors of both weight gradients."""

    x_R: Tensor
    dz_R: Tensor
    h_R: Tensor
    dout_R: Tensor
    largest_in: Tensor  # of dz * x, one number
    largest_out: Tensor  # of dout * h


def refuse_widths(x: Tensor, *widths: int) -> str:
    """Return why rows of such widths cannot be multiplied on the GPU of `x`, or ""."""
    # Where torch has rowwise grouped products; other cards with fp8 units have them dense only.
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] != 9:
        return "needs compute capability 9.0"
    if x.dtype != torch.bfloat16:
        return f"needs bf16, not {x.dtype}"
    words = " and ".join(map(str, widths))
    if any(width % MULTIPLE for width in widths):
        return f"needs widths in multiples of {MULTIPLE}, not {words}"
    if max(widths) > MOST_COLUMNS:
        return f"needs widths of at most {MOST_COLUMNS}, not {words}"
    return ""


def quantize_rows(x_TD: Tensor, source_R: Tensor | None = None, chosen: int = 1) -> Rows:
    """Return (R, D): every token rounded, or with `source_R` the token of each row's assignment.

    Assignment a belongs to token a // chosen; a row of assignment -1 is zero.
    """
    if not _in_triton(x_TD):
        # Of a transposed matrix too, the values lie row by row, as the units want them.
        x_RD = _gathered(x_TD, source_R, chosen).contiguous()
        values, scale = quantize(x_RD, -1)
        scale_R = scale[..., 0].float()
        # Over the scale, since squares of the numbers themselves may leave the range of fp32.
        scaled = torch.where(x_RD.isfinite(), x_RD / scale, 0.0).float()
        return Rows(values, scale_R, scaled.norm(dim=-1) * scale_R)
    x_TD = x_TD.contiguous()
    D = x_TD.shape[-1]
    shape = x_TD.shape[:-1] if source_R is None else source_R.shape
    values = x_TD.new_empty(*shape, D, dtype=E4M3)
    scale, norm = (x_TD.new_empty(shape, dtype=torch.float32) for _ in range(2))
    columns = triton.next_power_of_2(D)
    rows = max(1, ELEMENTS // columns)
    with on_device_of(x_TD):
        quantize_rows_kernel[(triton.cdiv(scale.numel(), rows),)](
            x_TD, source_R, values, scale, norm, scale.numel(), chosen, D, rows, columns,
            UPCAST=INTERPRETED, num_warps=4,
        )  # fmt: skip
    return Rows(values, scale, norm)


def quantize_columns(w: Tensor, tile: Tile = COLUMNS) -> Rows:
    """Return (..., K, N) of (..., N, K): every column rounded, as a row."""
    if not _in_triton(w):
        return quantize_rows(w.mT)
    w = w.contiguous()
    *stack, N, K = w.shape
    values = w.new_empty(*stack, K, N, dtype=E4M3)
    scale, norm = (w.new_empty(*stack, K, dtype=torch.float32) for _ in range(2))
    grid = (triton.cdiv(K, tile.columns), scale.numel() // K)
    with on_device_of(w):
        quantize_columns_kernel[grid](
            w, values, scale, norm, N, K, tile.rows, tile.columns, STAGES, UPCAST=INTERPRETED,
            num_warps=tile.warps,
        )  # fmt: skip
    return Rows(values, scale, norm)


def activate_rows(
    z_RF: Tensor,
    x_norm_R: Tensor,
    w_norm: Tensor,
    weights: RowWeights | None,
    tile: Tile = ACTIVATE,
) -> tuple[Rounded, Rounded]:
    """Return weight * gelu(z), and z itself for the backward; both (R, F).

    `x_norm_R` and `w_norm` are the norms of the factors of z, of `w` the largest one.
    """
    if not _in_triton(z_RF):
        weight_R = _weight_of_rows(weights, z_RF)
        has_R1 = _has_token(weights, z_RF)[:, None]
        z_scale_R = scale_for(x_norm_R * w_norm * PRODUCT_SLACK)
        h_scale_R = scale_for(z_scale_R * weight_R.abs() * E4M3_MAX)
        z_RF = torch.where(has_R1, z_RF, 0.0).to(torch.promote_types(z_RF.dtype, torch.float32))
        h_RF = activate(z_RF, "gelu") * weight_R[:, None]
        return tuple(  # type: ignore[return-value]
            Rounded(to_e4m3(rows / scale_R[:, None]), scale_R)
            for rows, scale_R in ((h_RF, h_scale_R), (z_RF, z_scale_R))
        )
    R, F = z_RF.shape
    tile = fit_tile(tile, F)
    h, kept = (z_RF.new_empty(R, F, dtype=E4M3) for _ in range(2))
    h_scale, kept_scale = (z_RF.new_empty(R, dtype=torch.float32) for _ in range(2))
    tiles = triton.cdiv(R, tile.rows) * triton.cdiv(F, tile.columns)
    with on_device_of(z_RF):
        activate_e4m3_kernel[(tiles,)](
            z_RF, x_norm_R, w_norm, *_pointers(weights), h, h_scale, kept, kept_scale, R, F,
            tile.rows, tile.columns, UPCAST=INTERPRETED, num_warps=tile.warps,
        )  # fmt: skip
    return Rounded(h, h_scale), Rounded(kept, kept_scale)


def gradient_scales(
    dout: Rows, w_norm: Tensor, weights: RowWeights | None, x_scale_R: Tensor, h_scale_R: Tensor
) -> GradientScales:
    """Return the scales of what the weight gradients multiply; `w_norm` is that of w_out."""
    if not use_triton(w_norm):
        weight_R = _weight_of_rows(weights, dout.norm)
        dz_R = scale_for(dout.norm * w_norm * weight_R.abs() * (PRODUCT_SLACK * STEEPEST))
        has_R = _has_token(weights, dz_R)
        pairs = ((dz_R, x_scale_R), (dout.scale, h_scale_R))
        products = ((torch.where(has_R, a, 0.0) * b).amax() for a, b in pairs)
        largest = (most.clamp(LEAST_PRODUCT, LARGEST_PRODUCT) for most in products)
        return GradientScales(x_scale_R, dz_R, h_scale_R, dout.scale, *largest)
    R = x_scale_R.shape[0]
    dz_R = torch.empty_like(x_scale_R)
    # Both 16 bytes apart, as the products want to find them.
    largest_24 = x_scale_R.new_full((2, 4), LEAST_PRODUCT).view(torch.int32)
    with on_device_of(x_scale_R):
        gradient_scales_kernel[(triton.cdiv(R, SCALES),)](
            dout.norm, w_norm, *_pointers(weights), x_scale_R, h_scale_R, dout.scale, dz_R,
            largest_24, R, SCALES,
        )  # fmt: skip
    largest_in, largest_out = largest_24.view(torch.float32)[:, 0].unbind()
    return GradientScales(x_scale_R, dz_R, h_scale_R, dout.scale, largest_in, largest_out)


def slope_rows(
    z: Rounded,
    dh_RF: Tensor,
    weights: RowWeights | None,
    scales: GradientScales,
    tile: Tile = SLOPES,
) -> Slopes:
    """Return what follows from dh, the gradient of the weighted activation over the weights."""
    if not _in_triton(dh_RF):
        wide = torch.promote_types(dh_RF.dtype, torch.float32)
        weight_R1, has_R1 = _weight_of_rows(weights, dh_RF)[:, None], _has_token(weights, dh_RF)
        dh_RF = torch.where(has_R1[:, None], dh_RF, 0.0).to(wide)
        z_RF = z.values.to(wide) * z.scale[:, None]
        h_RF, dz_RF = activate(z_RF, "gelu"), slope(z_RF, dh_RF, "gelu") * weight_R1
        dz_R, _ = balanced_scales(scales.dz_R, scales.x_R, scales.largest_in)
        _, h_R = balanced_scales(scales.dout_R, scales.h_R, scales.largest_out)
        dweights = None
        if weights is not None:
            dot_R = (dh_RF * h_RF).sum(1)
            dweights = dot_R
            if weights.source_R is not None:
                own_R = weights.source_R >= 0
                dweights = dot_R.new_empty(weights.values_R.numel())
                dweights[weights.source_R[own_R].long()] = dot_R[own_R]
        return Slopes(
            Rounded(to_e4m3(dz_RF / scales.dz_R[:, None]), scales.dz_R),
            to_e4m3(dz_RF / dz_R[:, None]).T.contiguous(),
            to_e4m3(h_RF * weight_R1 / h_R[:, None]).T.contiguous(),
            dweights,
        )
    R, F = dh_RF.shape
    dz = dh_RF.new_empty(R, F, dtype=E4M3)
    dz_FR, h_FR = (dh_RF.new_empty(F, R, dtype=E4M3) for _ in range(2))
    dweights = None
    if weights is not None:
        dweights = dh_RF.new_empty(weights.values_R.numel(), dtype=torch.float32)
    columns = column_block(F, tile.columns)
    with on_device_of(dh_RF):
        slopes_e4m3_kernel[(triton.cdiv(R, tile.rows),)](
            z.values, z.scale, dh_RF, *_pointers(weights), *scales, dz.view(torch.uint8),
            *(t.view(torch.int32) for t in (dz_FR, h_FR)), dweights, R, F, tile.rows // 4, columns,
            STAGES, UPCAST=INTERPRETED, num_warps=tile.warps,
        )  # fmt: skip
    return Slopes(Rounded(dz, scales.dz_R), dz_FR, h_FR, dweights)


def transpose_rows(
    x_TD: Tensor,
    source_R: Tensor | None,
    chosen: int,
    factors: tuple[Tensor, Tensor, Tensor],
    first: bool,
    tile: Tile = TRANSPOSE,
) -> Tensor:
    """Return (D, R) in e4m3: the rows as `quantize_rows` takes them, for a sum over rows.

    `factors`: the scales of the first and the second factor of that sum, and their largest product;
    these rows are the first of the two or the second.
    """
    a_R, b_R, largest = factors
    if not _in_triton(x_TD):
        scale_R = balanced_scales(a_R, b_R, largest)[0 if first else 1]
        return to_e4m3(_gathered(x_TD, source_R, chosen) / scale_R[:, None]).T.contiguous()
    x_TD = x_TD.contiguous()
    R, D = a_R.shape[0], x_TD.shape[1]
    out_DR = x_TD.new_empty(D, R, dtype=E4M3)
    own_R, other_R = (a_R, b_R) if first else (b_R, a_R)
    columns = column_block(D, tile.columns)
    with on_device_of(x_TD):
        transpose_rows_kernel[(triton.cdiv(R, tile.rows) * triton.cdiv(D, columns),)](
            x_TD, source_R, own_R, other_R, largest, out_DR.view(torch.int32), R, chosen, D, first,
            tile.rows // 4, columns, UPCAST=INTERPRETED, num_warps=tile.warps,
        )  # fmt: skip
    return out_DR


def _in_triton(x: Tensor) -> bool:
    return use_triton(x) and x.dtype == torch.bfloat16 and not is_counting()


def _pointers(weights: RowWeights | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if weights is None else (weights.values_R.contiguous(), weights.source_R)


def _gathered(x_TD: Tensor, source_R: Tensor | None, chosen: int) -> Tensor:
    if source_R is None:
        return x_TD
    return torch.where(source_R[:, None] >= 0, x_TD[source_R.clamp_min(0) // chosen], 0.0)


def _has_token(weights: RowWeights | None, rows: Tensor) -> Tensor:
    if weights is None or weights.source_R is None:
        return torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
    return weights.source_R >= 0


def _weight_of_rows(weights: RowWeights | None, rows: Tensor) -> Tensor:
    if weights is None:
        return torch.ones(rows.shape[0], device=rows.device)
    if weights.source_R is None:
        return weights.values_R
    own_R = weights.values_R[weights.source_R.clamp_min(0)]
    return torch.where(weights.source_R >= 0, own_R, 0.0)
