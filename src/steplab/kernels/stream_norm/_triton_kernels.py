"""The kernels: forward over tiles of rows, the chosen rows of the norm, and one backward."""

# R rows of a tile, D width padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels._triton_rounding import narrow


# fmt: off
@triton.jit
def _source(places, row_R, inside_R, LENGTH: tl.constexpr, TAKEN: tl.constexpr):
    """Return which of the taken rows belongs to each row, and whether there is one."""
    place_R = tl.load(places + row_R, mask=inside_R, other=TAKEN)
    return (row_R // LENGTH).to(tl.int64) * TAKEN + place_R, place_R < TAKEN


@triton.jit
def _vector(pointer, d_D, WIDTH: tl.constexpr):
    return tl.load(pointer + d_D, mask=d_D < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def stream_rms_norm_forward_kernel(
    x, added, places, weight, offset, router, stream, normed, rstd, score, rows, eps,
    LENGTH: tl.constexpr, TAKEN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, UPCAST: tl.constexpr,
):
    """What is None is left out: what to add, places, offset, router; norm, score. Grid: tiles."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d_D = tl.arange(0, D)
    inside_R = row_R < rows
    inside_RD = inside_R[:, None] & (d_D[None, :] < WIDTH)
    place_RD = row_R.to(tl.int64)[:, None] * WIDTH + d_D[None, :]
    x_RD = tl.load(x + place_RD, mask=inside_RD, other=0.0).to(tl.float32)
    if added is not None:
        if places is not None:
            source_R, has_R = _source(places, row_R, inside_R, LENGTH, TAKEN)
            added_RD = tl.load(
                added + source_R[:, None] * WIDTH + d_D[None, :],
                mask=inside_RD & has_R[:, None], other=0.0)
        else:
            added_RD = tl.load(added + place_RD, mask=inside_RD, other=0.0)
        rounded_RD = narrow(x_RD + added_RD.to(tl.float32), stream.dtype.element_ty, UPCAST)
        tl.store(stream + place_RD, rounded_RD, mask=inside_RD)
        x_RD = rounded_RD.to(tl.float32)
    if offset is not None:
        x_RD += _vector(offset, d_D, WIDTH)[None, :]
    rstd_R = tl.rsqrt(tl.sum(x_RD * x_RD, 1) / WIDTH + eps)
    tl.store(rstd + row_R, rstd_R, mask=inside_R)
    normed_RD = x_RD * rstd_R[:, None] * _vector(weight, d_D, WIDTH)[None, :]
    if score is not None:
        score_R = tl.sum(normed_RD * _vector(router, d_D, WIDTH)[None, :], 1)
        tl.store(score + row_R, score_R, mask=inside_R)
    if normed is not None:
        target_RD = narrow(normed_RD, normed.dtype.element_ty, UPCAST)
        tl.store(normed + place_RD, target_RD, mask=inside_RD)


@triton.jit
def stream_rms_norm_rows_kernel(
    stream, rstd, chosen, weight, offset, normed, rows, LENGTH: tl.constexpr,
    TAKEN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Norm the chosen rows by what the forward found of them. Grid: tiles of taken rows."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d_D = tl.arange(0, D)
    inside_R = row_R < rows
    inside_RD = inside_R[:, None] & (d_D[None, :] < WIDTH)
    within_R = tl.load(chosen + row_R, mask=inside_R, other=0)
    source_R = (row_R // TAKEN).to(tl.int64) * LENGTH + within_R
    x_RD = tl.load(
        stream + source_R[:, None] * WIDTH + d_D[None, :], mask=inside_RD, other=0.0
    ).to(tl.float32)
    rstd_R = tl.load(rstd + source_R, mask=inside_R, other=0.0)
    if offset is not None:
        x_RD += _vector(offset, d_D, WIDTH)[None, :]
    normed_RD = x_RD * rstd_R[:, None] * _vector(weight, d_D, WIDTH)[None, :]
    place_RD = row_R.to(tl.int64)[:, None] * WIDTH + d_D[None, :]
    tl.store(normed + place_RD, narrow(normed_RD, normed.dtype.element_ty, UPCAST), mask=inside_RD)


@triton.jit
def stream_rms_norm_backward_kernel(
    d_normed, places, d_score, d_stream, stream, rstd, weight, offset, router, dx, partial, rows,
    LENGTH: tl.constexpr, TAKEN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write dx and this program's sums over its rows, three rows of `partial`: of d_normed times
    the unit rows, of d_score times these, and of what reached the offset. None is left out: 0.
    Grid: programs, each takes every n-th tile."""
    row_R, d_D = tl.arange(0, ROWS), tl.arange(0, D)
    weight_D = _vector(weight, d_D, WIDTH)
    along_weight_RD = tl.zeros([ROWS, D], tl.float32)
    along_score_RD = tl.zeros([ROWS, D], tl.float32)
    shifted_RD = tl.zeros([ROWS, D], tl.float32)
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        here_R = first + row_R
        inside_R = here_R < rows
        inside_RD = inside_R[:, None] & (d_D[None, :] < WIDTH)
        place_RD = here_R.to(tl.int64)[:, None] * WIDTH + d_D[None, :]
        if places is not None:
            source_R, has_R = _source(places, here_R, inside_R, LENGTH, TAKEN)
            d_RD = tl.load(
                d_normed + source_R[:, None] * WIDTH + d_D[None, :],
                mask=inside_RD & has_R[:, None], other=0.0).to(tl.float32)
        else:
            d_RD = tl.load(d_normed + place_RD, mask=inside_RD, other=0.0).to(tl.float32)
        unit_RD = tl.load(stream + place_RD, mask=inside_RD, other=0.0).to(tl.float32)
        if offset is not None:
            unit_RD += _vector(offset, d_D, WIDTH)[None, :]
        rstd_R = tl.load(rstd + here_R, mask=inside_R, other=0.0)
        unit_RD *= rstd_R[:, None]
        along_weight_RD += d_RD * unit_RD
        if d_score is not None:
            d_score_R = tl.load(d_score + here_R, mask=inside_R, other=0.0).to(tl.float32)
            along_score_RD += d_score_R[:, None] * unit_RD
            d_RD += d_score_R[:, None] * _vector(router, d_D, WIDTH)[None, :]
        d_RD *= weight_D[None, :]
        along_R = tl.sum(d_RD * unit_RD, 1) / WIDTH
        dx_RD = (d_RD - unit_RD * along_R[:, None]) * rstd_R[:, None]
        if offset is not None:
            shifted_RD += dx_RD
        if d_stream is not None:
            dx_RD += tl.load(d_stream + place_RD, mask=inside_RD, other=0.0).to(tl.float32)
        tl.store(dx + place_RD, narrow(dx_RD, dx.dtype.element_ty, UPCAST), mask=inside_RD)
    own = partial + tl.program_id(0) * 3 * WIDTH + d_D
    tl.store(own, tl.sum(along_weight_RD, 0), mask=d_D < WIDTH)
    tl.store(own + WIDTH, tl.sum(along_score_RD, 0), mask=d_D < WIDTH)
    tl.store(own + 2 * WIDTH, tl.sum(shifted_RD, 0), mask=d_D < WIDTH)
