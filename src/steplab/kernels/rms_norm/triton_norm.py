"""Addition and norm in one kernel; in the backward, one kernel adds both gradients of the stream.

Saved for the backward: the stream and one number per row. torch.compile sees opaque ops.
"""

# D width (in the kernels padded to a power of two), R rows of a tile, P programs of the backward
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels.norm_rows import (
    Tiling,
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
def rms_norm_forward_kernel(
    x, added, weight, normed, stream, rstd, rows, eps, WIDTH: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, ADDED: tl.constexpr, UPCAST: tl.constexpr,
):
    """Norm one tile of rows, after adding and storing the stream if ADDED. Grid: tiles."""
    row = tl.program_id(0) * ROWS
    origin = row.to(tl.int64) * WIDTH
    row_R, d_D = tl.arange(0, ROWS), tl.arange(0, D)
    inside_RD = (row_R[:, None] < rows - row) & (d_D[None, :] < WIDTH)
    offset_RD = row_R[:, None] * WIDTH + d_D[None, :]
    stream_RD = load_stream(x, added, stream, origin, offset_RD, inside_RD, ADDED, UPCAST)
    rstd_R = tl.rsqrt(tl.sum(stream_RD * stream_RD, 1) / WIDTH + eps)
    tl.store(rstd + row + row_R, rstd_R, mask=row_R < rows - row)
    weight_D = tl.load(weight + d_D, mask=d_D < WIDTH, other=0.0).to(tl.float32)
    normed_RD = stream_RD * rstd_R[:, None] * weight_D[None, :]
    target_RD = narrow(normed_RD, normed.dtype.element_ty, UPCAST)
    tl.store(normed + origin + offset_RD, target_RD, mask=inside_RD)


@triton.jit
def rms_norm_backward_kernel(
    d_normed, d_stream, stream, weight, rstd, dx, partial, rows, WIDTH: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, PASSED: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write dx, plus the gradient of the stream itself if PASSED, and this program's part of the
    weight's gradient: one row of `partial`, in fp32. Grid: programs, each takes every n-th tile."""
    row_R, d_D = tl.arange(0, ROWS), tl.arange(0, D)
    offset_RD = row_R[:, None] * WIDTH + d_D[None, :]
    weight_D = tl.load(weight + d_D, mask=d_D < WIDTH, other=0.0).to(tl.float32)
    sum_RD = tl.zeros([ROWS, D], tl.float32)
    step = tl.num_programs(0) * ROWS
    for row in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        origin = tl.cast(row, tl.int64) * WIDTH
        inside_RD = (row_R[:, None] < rows - row) & (d_D[None, :] < WIDTH)
        d_RD = tl.load(d_normed + origin + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
        x_RD = tl.load(stream + origin + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
        rstd_R = tl.load(rstd + row + row_R, mask=row_R < rows - row, other=0.0)
        unit_RD = x_RD * rstd_R[:, None]
        sum_RD += d_RD * unit_RD
        d_RD *= weight_D[None, :]
        along_R = tl.sum(d_RD * unit_RD, 1) / WIDTH
        dx_RD = (d_RD - unit_RD * along_R[:, None]) * rstd_R[:, None]
        store_gradient(dx, d_stream, dx_RD, origin, offset_RD, inside_RD, PASSED, UPCAST)
    tl.store(partial + tl.program_id(0) * WIDTH + d_D, tl.sum(sum_RD, 0), mask=d_D < WIDTH)
# fmt: on


def launch_forward(
    x: Tensor,
    added: Tensor | None,
    weight_D: Tensor,
    eps: float,
    dtype: torch.dtype | None,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed, stream (`x` itself where nothing is added) and 1 / root-mean-square."""
    x, added = x.contiguous(), None if added is None else added.contiguous()
    normed, stream, rstd = empty_outputs(x, added, dtype)
    width, rows = x.shape[-1], rstd.numel()
    tiling = tiling or tilings(padded_width(width))[0]
    if rows:
        with on_device_of(x):
            rms_norm_forward_kernel[(triton.cdiv(rows, tiling.rows),)](
                x, added, weight_D.contiguous(), normed, stream, rstd, rows, eps, WIDTH=width,
                D=padded_width(width), ROWS=tiling.rows, ADDED=added is not None,
                UPCAST=INTERPRETED, num_warps=tiling.warps,
            )  # fmt: skip
    return normed, stream, rstd


def launch_backward(
    d_normed: Tensor,
    d_stream: Tensor | None,
    stream: Tensor,
    weight_D: Tensor,
    rstd: Tensor,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the stream and of the weight; sums have one fixed order."""
    d_normed, stream = d_normed.contiguous(), stream.contiguous()
    d_stream = None if d_stream is None else d_stream.contiguous()
    width, rows = stream.shape[-1], rstd.numel()
    tiling = tiling or tilings(padded_width(width))[1]
    programs = backward_programs(tiling, rows, stream)
    dx, partial_PD = torch.empty_like(stream), rstd.new_empty(programs, width)
    with on_device_of(stream):
        rms_norm_backward_kernel[(programs,)](
            d_normed, d_stream, stream, weight_D.contiguous(), rstd, dx, partial_PD, rows,
            WIDTH=width, D=padded_width(width), ROWS=tiling.rows, PASSED=d_stream is not None,
            STAGES=tiling.stages, UPCAST=INTERPRETED, num_warps=tiling.warps,
        )  # fmt: skip
    return dx, column_sums(partial_PD, weight_D.dtype)


def refuse(x: Tensor, weight_D: Tensor, added: Tensor | None = None) -> str:
    """Return why it cannot run, or ""."""
    return refuse_rows(x, added, weight_D)


def rms_norm(
    x: Tensor, weight_D: Tensor, eps: float, added: Tensor | None, dtype: torch.dtype | None
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
        dx, d_added = split_gradient(d_stream, ctx.dtypes)
        return dx, dweight_D, None, d_added, None


@torch.library.custom_op("steplab::rms_norm", mutates_args=())
def _norm(x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    normed, _, rstd = launch_forward(x, None, weight_D, eps, dtype)
    return normed, rstd


@torch.library.custom_op("steplab::add_rms_norm", mutates_args=())
def _add_and_norm(
    x: Tensor, added: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    return launch_forward(x, added, weight_D, eps, dtype)


@torch.library.custom_op("steplab::rms_norm_backward", mutates_args=())
def _backward(
    d_normed: Tensor, d_stream: Tensor | None, stream: Tensor, weight_D: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return launch_backward(d_normed, d_stream, stream, weight_D, rstd)


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
