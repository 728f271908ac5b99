"""The two kernels: a forward over tiles of rows, a backward whose programs each walk over many."""

# R rows of a tile, D width padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels._triton_rounding import narrow


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
    place_RD = row_R[:, None] * WIDTH + d_D[None, :]
    stream_RD = tl.load(x + origin + place_RD, mask=inside_RD, other=0.0).to(tl.float32)
    if ADDED:
        added_RD = tl.load(added + origin + place_RD, mask=inside_RD, other=0.0).to(tl.float32)
        rounded_RD = narrow(stream_RD + added_RD, stream.dtype.element_ty, UPCAST)
        tl.store(stream + origin + place_RD, rounded_RD, mask=inside_RD)
        stream_RD = rounded_RD.to(tl.float32)
    rstd_R = tl.rsqrt(tl.sum(stream_RD * stream_RD, 1) / WIDTH + eps)
    tl.store(rstd + row + row_R, rstd_R, mask=row_R < rows - row)
    weight_D = tl.load(weight + d_D, mask=d_D < WIDTH, other=0.0).to(tl.float32)
    normed_RD = stream_RD * rstd_R[:, None] * weight_D[None, :]
    target_RD = narrow(normed_RD, normed.dtype.element_ty, UPCAST)
    tl.store(normed + origin + place_RD, target_RD, mask=inside_RD)


@triton.jit
def rms_norm_backward_kernel(
    d_normed, d_stream, stream, weight, rstd, dx, partial, rows, WIDTH: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, PASSED: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Write dx, with the gradient that passed by the norm if PASSED, and this program's part of the
    weight's gradient: one row of `partial`, in fp32. Grid: programs, each takes every n-th tile."""
    row_R, d_D = tl.arange(0, ROWS), tl.arange(0, D)
    place_RD = row_R[:, None] * WIDTH + d_D[None, :]
    weight_D = tl.load(weight + d_D, mask=d_D < WIDTH, other=0.0).to(tl.float32)
    sum_RD = tl.zeros([ROWS, D], tl.float32)
    step = tl.num_programs(0) * ROWS
    for row in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        origin = tl.cast(row, tl.int64) * WIDTH
        inside_RD = (row_R[:, None] < rows - row) & (d_D[None, :] < WIDTH)
        d_RD = tl.load(d_normed + origin + place_RD, mask=inside_RD, other=0.0).to(tl.float32)
        x_RD = tl.load(stream + origin + place_RD, mask=inside_RD, other=0.0).to(tl.float32)
        rstd_R = tl.load(rstd + row + row_R, mask=row_R < rows - row, other=0.0)
        unit_RD = x_RD * rstd_R[:, None]
        sum_RD += d_RD * unit_RD
        d_RD *= weight_D[None, :]
        along_R = tl.sum(d_RD * unit_RD, 1) / WIDTH
        dx_RD = (d_RD - unit_RD * along_R[:, None]) * rstd_R[:, None]
        if PASSED:
            dx_RD += tl.load(d_stream + origin + place_RD, mask=inside_RD, other=0.0).to(tl.float32)
        tl.store(dx + origin + place_RD, narrow(dx_RD, dx.dtype.element_ty, UPCAST), mask=inside_RD)
    tl.store(partial + tl.program_id(0) * WIDTH + d_D, tl.sum(sum_RD, 0), mask=d_D < WIDTH)
