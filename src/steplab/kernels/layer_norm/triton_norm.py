"""Addition and norm in one kernel; in the backward, one kernel adds both gradients of the stream.

Saved for the backward: the stream and two numbers per row. torch.compile sees opaque ops. Tilings
are those of `rms_norm`, whose rows take as many registers: 27 us forward and 28 backward for 16,384
rows of 768 on an H200, where memory needs 24 for each.
"""

# D width (in the kernels padded to a power of two), R rows of a tile, P programs of the backward
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels.norm_rows import (
    backward_programs,
    empty_outputs,
    load_stream,
    padded_width,
    refuse_rows,
    split_gradient,
    store_gradient,
    tilings,
)
from steplab.kernels.triton_blocks import column_sums, narrow
from steplab.kernels.triton_runtime import INTERPRETED, on_device_of, tl, triton

NEEDS_GPU = True


# fmt: off
@triton.jit
def layer_norm_forward_kernel(
    x, added, weight, bias, normed, stream, mean, rstd, rows, eps, WIDTH: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, ADDED: tl.constexpr, BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Norm one tile of rows, after adding and storing the stream if ADDED. Grid: tiles."""
    row = tl.program_id(0) * ROWS
    origin = row.to(tl.int64) * WIDTH
    row_R, d_D = tl.arange(0, ROWS), tl.arange(0, D)
    inside_RD = (row_R[:, None] < rows - row) & (d_D[None, :] < WIDTH)
    offset_RD = row_R[:, None] * WIDTH + d_D[None, :]
    stream_RD = load_stream(x, added, stream, origin, offset_RD, inside_RD, ADDED, UPCAST)
    mean_R = tl.sum(stream_RD, 1) / WIDTH
    # Beyond the width there are zeros, which would count as far from the mean.
    centered_RD = tl.where(inside_RD, stream_RD - mean_R[:, None], 0.0)
    rstd_R = tl.rsqrt(tl.sum(centered_RD * centered_RD, 1) / WIDTH + eps)
    tl.store(mean + row + row_R, mean_R, mask=row_R < rows - row)
    tl.store(rstd + row + row_R, rstd_R, mask=row_R < rows - row)
    weight_D = tl.load(weight + d_D, mask=d_D < WIDTH, other=0.0).to(tl.float32)
    normed_RD = centered_RD * rstd_R[:, None] * weight_D[None, :]
    if BIAS:
        bias_D = tl.load(bias + d_D, mask=d_D < WIDTH, other=0.0).to(tl.float32)
        normed_RD += bias_D[None, :]
    target_RD = narrow(normed_RD, normed.dtype.element_ty, UPCAST)
    tl.store(normed + origin + offset_RD, target_RD, mask=inside_RD)


@triton.jit
def layer_norm_backward_kernel(
    d_normed, d_stream, stream, weight, mean, rstd, dx, partial, rows, WIDTH: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, PASSED: tl.constexpr, BIAS: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write dx, plus the gradient of the stream itself if PASSED, and this program's parts of the
    gradients of weight and, if BIAS, bias: one or two rows of `partial`, in fp32. Grid: programs,
    each takes every n-th tile."""
    row_R, d_D = tl.arange(0, ROWS), tl.arange(0, D)
    offset_RD = row_R[:, None] * WIDTH + d_D[None, :]
    weight_D = tl.load(weight + d_D, mask=d_D < WIDTH, other=0.0).to(tl.float32)
    weight_sum_RD = tl.zeros([ROWS, D], tl.float32)
    bias_sum_RD = tl.zeros([ROWS, D], tl.float32)
    step = tl.num_programs(0) * ROWS
    for row in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        origin = tl.cast(row, tl.int64) * WIDTH
        inside_RD = (row_R[:, None] < rows - row) & (d_D[None, :] < WIDTH)
        d_RD = tl.load(d_normed + origin + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
        x_RD = tl.load(stream + origin + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
        mean_R = tl.load(mean + row + row_R, mask=row_R < rows - row, other=0.0)
        rstd_R = tl.load(rstd + row + row_R, mask=row_R < rows - row, other=0.0)
        unit_RD = tl.where(inside_RD, (x_RD - mean_R[:, None]) * rstd_R[:, None], 0.0)
        weight_sum_RD += d_RD * unit_RD
        if BIAS:
            bias_sum_RD += d_RD
        d_RD *= weight_D[None, :]
        along_R = tl.sum(d_RD * unit_RD, 1) / WIDTH
        level_R = tl.sum(d_RD, 1) / WIDTH
        dx_RD = (d_RD - level_R[:, None] - unit_RD * along_R[:, None]) * rstd_R[:, None]
        store_gradient(dx, d_stream, dx_RD, origin, offset_RD, inside_RD, PASSED, UPCAST)
    sums: tl.constexpr = 2 if BIAS else 1
    own = partial + tl.program_id(0) * sums * WIDTH
    tl.store(own + d_D, tl.sum(weight_sum_RD, 0), mask=d_D < WIDTH)
    if BIAS:
        tl.store(own + WIDTH + d_D, tl.sum(bias_sum_RD, 0), mask=d_D < WIDTH)
# fmt: on


def refuse(
    x: Tensor, weight_D: Tensor, bias_D: Tensor | None = None, added: Tensor | None = None
) -> str:
    """Return why it cannot run, or ""."""
    return refuse_rows(x, added, weight_D, bias_D)


def layer_norm(
    x: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    added: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return (normed, stream)."""
    out: tuple[Tensor, Tensor] = _AddAndNorm.apply(x, weight_D, bias_D, eps, added, dtype)
    return out


class _AddAndNorm(torch.autograd.Function):
    """The stream passes through, so that all of its gradient arrives in one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_D: Tensor,
        bias_D: Tensor | None,
        eps: float,
        added: Tensor | None,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        if added is None:
            stream = x
            normed, mean, rstd = _norm(x, weight_D, bias_D, eps, dtype or x.dtype)
        else:
            normed, stream, mean, rstd = _add_and_norm(x, added, weight_D, bias_D, eps, dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(stream, weight_D, mean, rstd)
        ctx.dtypes = (x.dtype, None if added is None else added.dtype)
        ctx.bias_dtype = None if bias_D is None else bias_D.dtype
        return normed, stream

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_normed, d_stream = gradients
        dweight_D = dbias_D = None
        if d_normed is not None:
            has_bias = ctx.bias_dtype is not None
            found = _backward(d_normed, d_stream, *ctx.saved_tensors, has_bias)
            d_stream, dweight_D, dbias_D = found
            dbias_D = dbias_D.to(ctx.bias_dtype) if has_bias else None
        dx, d_added = split_gradient(d_stream, ctx.dtypes)
        return dx, dweight_D, dbias_D, None, d_added, None


@torch.library.custom_op("steplab::layer_norm", mutates_args=())
def _norm(
    x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    normed, _, mean, rstd = _launch_forward(x, None, weight_D, bias_D, eps, dtype)
    return normed, mean, rstd


@torch.library.custom_op("steplab::add_layer_norm", mutates_args=())
def _add_and_norm(
    x: Tensor,
    added: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _launch_forward(x, added, weight_D, bias_D, eps, dtype)


@torch.library.custom_op("steplab::layer_norm_backward", mutates_args=())
def _backward(
    d_normed: Tensor,
    d_stream: Tensor | None,
    stream: Tensor,
    weight_D: Tensor,
    mean: Tensor,
    rstd: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d_normed, stream = d_normed.contiguous(), stream.contiguous()
    d_stream = None if d_stream is None else d_stream.contiguous()
    width, rows = stream.shape[-1], rstd.numel()
    tiling = tilings(padded_width(width))[1]
    programs = backward_programs(tiling, rows, stream)
    dx = torch.empty_like(stream)
    partial = rstd.new_empty(programs, *([2] if has_bias else []), width)
    with on_device_of(stream):
        layer_norm_backward_kernel[(programs,)](
            d_normed, d_stream, stream, weight_D.contiguous(), mean, rstd, dx, partial, rows,
            WIDTH=width, D=padded_width(width), ROWS=tiling.rows, PASSED=d_stream is not None,
            BIAS=has_bias, STAGES=tiling.stages, UPCAST=INTERPRETED, num_warps=tiling.warps,
        )  # fmt: skip
    if not has_bias:
        return dx, column_sums(partial, weight_D.dtype), rstd.new_empty(0)
    sums_2D = column_sums(partial)
    return dx, sums_2D[0].to(weight_D.dtype, copy=True), sums_2D[1].clone()


def _launch_forward(
    x: Tensor,
    added: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, added = x.contiguous(), None if added is None else added.contiguous()
    normed, stream, mean, rstd = _empty_outputs(x, added, dtype)
    width, rows = x.shape[-1], rstd.numel()
    tiling = tilings(padded_width(width))[0]
    if rows:
        with on_device_of(x):
            layer_norm_forward_kernel[(triton.cdiv(rows, tiling.rows),)](
                x, added, weight_D.contiguous(), None if bias_D is None else bias_D.contiguous(),
                normed, stream, mean, rstd, rows, eps, WIDTH=width, D=padded_width(width),
                ROWS=tiling.rows, ADDED=added is not None, BIAS=bias_D is not None,
                UPCAST=INTERPRETED, num_warps=tiling.warps,
            )  # fmt: skip
    return normed, stream, mean, rstd


def _empty_outputs(
    x: Tensor, added: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return uninitialized normed, stream (`x` without `added`), means and 1 / deviations."""
    normed, stream, mean = empty_outputs(x, added, dtype)
    return normed, stream, mean, torch.empty_like(mean)


@_norm.register_fake
def _(
    x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    normed, _, mean, rstd = _empty_outputs(x, None, dtype)
    return normed, mean, rstd


@_add_and_norm.register_fake
def _(
    x: Tensor,
    added: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_outputs(x, added, dtype)


@_backward.register_fake
def _(
    d_normed: Tensor,
    d_stream: Tensor | None,
    stream: Tensor,
    weight_D: Tensor,
    mean: Tensor,
    rstd: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = weight_D.shape[0]
    dbias_D = rstd.new_empty(width if has_bias else 0)
    return stream.new_empty(stream.shape), weight_D.new_empty(width), dbias_D
