"""The Triton kernels of the stream norm, as ops that torch.compile does not look into.

One kernel over tiles of rows forward, one for the norm of the chosen rows, one backward.
"""

# B batch, S rows of a sequence, K rows taken, D width (in the kernels padded to a power of two),
# R rows of a tile, P programs of the backward
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels.norm_rows import backward_programs, padded_width, tilings
from steplab.kernels.triton_blocks import column_sums, narrow
from steplab.kernels.triton_runtime import INTERPRETED, on_device_of, tl, triton


# fmt: off
@triton.jit
def _source(slots, row_R, inside_R, LENGTH: tl.constexpr, TAKEN: tl.constexpr):
    """Return which of the taken rows belongs to each row, and whether there is one."""
    slot_R = tl.load(slots + row_R, mask=inside_R, other=TAKEN)
    return (row_R // LENGTH).to(tl.int64) * TAKEN + slot_R, slot_R < TAKEN


@triton.jit
def _vector(pointer, d_D, WIDTH: tl.constexpr):
    return tl.load(pointer + d_D, mask=d_D < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def stream_rms_norm_forward_kernel(
    x, added, slots, weight, offset, router, stream, normed, rstd, score, rows, eps,
    LENGTH: tl.constexpr, TAKEN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, UPCAST: tl.constexpr,
):
    """Add, norm and score one tile of rows; whatever is None is left out. Grid: tiles."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d_D = tl.arange(0, D)
    inside_R = row_R < rows
    inside_RD = inside_R[:, None] & (d_D[None, :] < WIDTH)
    offset_RD = row_R.to(tl.int64)[:, None] * WIDTH + d_D[None, :]
    x_RD = tl.load(x + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
    if added is not None:
        if slots is not None:
            source_R, has_R = _source(slots, row_R, inside_R, LENGTH, TAKEN)
            added_RD = tl.load(
                added + source_R[:, None] * WIDTH + d_D[None, :],
                mask=inside_RD & has_R[:, None], other=0.0)
        else:
            added_RD = tl.load(added + offset_RD, mask=inside_RD, other=0.0)
        rounded_RD = narrow(x_RD + added_RD.to(tl.float32), stream.dtype.element_ty, UPCAST)
        tl.store(stream + offset_RD, rounded_RD, mask=inside_RD)
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
        tl.store(normed + offset_RD, target_RD, mask=inside_RD)


@triton.jit
def stream_rms_norm_rows_kernel(
    stream, rstd, chosen, weight, offset, normed, rows, LENGTH: tl.constexpr,
    TAKEN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Norm the chosen rows by the rstd that the forward found. Grid: tiles of taken rows."""
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
    offset_RD = row_R.to(tl.int64)[:, None] * WIDTH + d_D[None, :]
    tl.store(normed + offset_RD, narrow(normed_RD, normed.dtype.element_ty, UPCAST), mask=inside_RD)


@triton.jit
def stream_rms_norm_backward_kernel(
    d_normed, slots, d_score, d_stream, stream, rstd, weight, offset, router, dx, partial, rows,
    LENGTH: tl.constexpr, TAKEN: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write dx and this program's sums over its rows, three rows of `partial`: of d_normed times
    the unit rows, of d_score times these, and of what reached the offset; 0 for what is None.
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
        offset_RD = here_R.to(tl.int64)[:, None] * WIDTH + d_D[None, :]
        if slots is not None:
            source_R, has_R = _source(slots, here_R, inside_R, LENGTH, TAKEN)
            d_RD = tl.load(
                d_normed + source_R[:, None] * WIDTH + d_D[None, :],
                mask=inside_RD & has_R[:, None], other=0.0).to(tl.float32)
        else:
            d_RD = tl.load(d_normed + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
        unit_RD = tl.load(stream + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
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
            dx_RD += tl.load(d_stream + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
        tl.store(dx + offset_RD, narrow(dx_RD, dx.dtype.element_ty, UPCAST), mask=inside_RD)
    own = partial + tl.program_id(0) * 3 * WIDTH + d_D
    tl.store(own, tl.sum(along_weight_RD, 0), mask=d_D < WIDTH)
    tl.store(own + WIDTH, tl.sum(along_score_RD, 0), mask=d_D < WIDTH)
    tl.store(own + 2 * WIDTH, tl.sum(shifted_RD, 0), mask=d_D < WIDTH)
# fmt: on


def launch_forward(
    x_BSD: Tensor,
    added: Tensor | None,
    slots_BS: Tensor | None,
    weight_D: Tensor,
    offset_D: Tensor | None,
    router_D: Tensor | None,
    eps: float,
    outputs: tuple[Tensor | None, ...],
) -> None:
    """Fill stream, norm, 1 / root-mean-square and score, those that are given."""
    width = x_BSD.shape[-1]
    tiling = tilings(padded_width(width))[0]
    rows = x_BSD.numel() // width
    vectors = (_dense(t) for t in (weight_D, offset_D, router_D))
    if rows:
        with on_device_of(x_BSD):
            stream_rms_norm_forward_kernel[(triton.cdiv(rows, tiling.rows),)](
                x_BSD.contiguous(), _dense(added), _dense(slots_BS), *vectors, *outputs, rows,
                eps, *_lengths(x_BSD, added, slots_BS), WIDTH=width, D=padded_width(width),
                ROWS=tiling.rows, UPCAST=INTERPRETED, num_warps=tiling.warps,
            )  # fmt: skip


def launch_rows(
    stream_BSD: Tensor,
    rstd_BS: Tensor,
    rows_BK: Tensor,
    weight_D: Tensor,
    offset_D: Tensor | None,
    normed_BKD: Tensor,
) -> None:
    """Fill the chosen rows of the norm."""
    stream_BSD, (length, width) = stream_BSD.contiguous(), stream_BSD.shape[-2:]
    tiling = tilings(padded_width(width))[0]
    if rows_BK.numel():
        with on_device_of(stream_BSD):
            stream_rms_norm_rows_kernel[(triton.cdiv(rows_BK.numel(), tiling.rows),)](
                stream_BSD, rstd_BS, _dense(rows_BK), _dense(weight_D), _dense(offset_D),
                normed_BKD, rows_BK.numel(), length, rows_BK.shape[1], WIDTH=width,
                D=padded_width(width), ROWS=tiling.rows, UPCAST=INTERPRETED,
                num_warps=tiling.warps,
            )  # fmt: skip


def launch_backward(
    d_normed: Tensor,
    slots_BS: Tensor | None,
    d_score_BS: Tensor | None,
    d_stream_BSD: Tensor | None,
    stream_BSD: Tensor,
    rstd_BS: Tensor,
    weight_D: Tensor,
    offset_D: Tensor | None,
    router_D: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the stream's gradient and sums (3, D) over all rows, in one fixed order."""
    stream_BSD, width = stream_BSD.contiguous(), stream_BSD.shape[-1]
    length, taken = _lengths(stream_BSD, d_normed, slots_BS)
    tiling = tilings(padded_width(width))[1]
    count = rstd_BS.numel()
    programs = backward_programs(tiling, count, stream_BSD)
    partial_P3D = rstd_BS.new_empty(programs, 3, width)
    dx_BSD = torch.empty_like(stream_BSD)
    gradients = (_dense(t) for t in (d_normed, slots_BS, d_score_BS, d_stream_BSD))
    vectors = (_dense(t) for t in (weight_D, offset_D, router_D))
    with on_device_of(stream_BSD):
        stream_rms_norm_backward_kernel[(programs,)](
            *gradients, stream_BSD, rstd_BS, *vectors, dx_BSD, partial_P3D, count, LENGTH=length,
            TAKEN=taken, WIDTH=width, D=padded_width(width), ROWS=tiling.rows,
            STAGES=tiling.stages, UPCAST=INTERPRETED, num_warps=tiling.warps,
        )  # fmt: skip
    return dx_BSD, column_sums(partial_P3D)


def _lengths(x_BSD: Tensor, taken: Tensor | None, slots_BS: Tensor | None) -> tuple[int, int]:
    """Return the rows and the taken rows of a sequence, for each of which a kernel is compiled.

    Without a selection nothing reads them, and varying lengths must not compile new kernels.
    """
    if taken is None or slots_BS is None:
        return 1, 1
    return x_BSD.shape[-2], taken.shape[-2]


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _outputs(
    x: Tensor, added: Tensor | None, router_D: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return stream, norm, 1 / root-mean-square and score; those not asked for have no elements."""
    wide = x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)
    stream = x.new_empty(x.shape if added is not None else 0, dtype=wide)
    normed = x.new_empty(x.shape if dtype is not None else 0, dtype=dtype or x.dtype)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    score = rstd.new_empty(rstd.shape if router_D is not None else 0)
    return stream, normed, rstd, score


@torch.library.custom_op("steplab::stream_norm", mutates_args=())
def stream_forward(
    x: Tensor,
    added: Tensor | None,
    slots: Tensor | None,
    weight_D: Tensor,
    offset_D: Tensor | None,
    router_D: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return stream (if something is added), norm (if given a dtype), 1 / rms, score (if routed).

    What is not asked for has no elements.
    """
    found = stream, normed, rstd, score = _outputs(x, added, router_D, dtype)
    outputs = (
        None if added is None else stream,
        None if dtype is None else normed,
        rstd,
        None if router_D is None else score,
    )
    launch_forward(x, added, slots, weight_D, offset_D, router_D, eps, outputs)
    return found


@stream_forward.register_fake
def _(x: Tensor, added: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, router_D, _, dtype = rest
    return _outputs(x, added, router_D, dtype)


@torch.library.custom_op("steplab::stream_norm_rows", mutates_args=())
def stream_rows(
    stream: Tensor,
    rstd: Tensor,
    rows: Tensor,
    weight_D: Tensor,
    offset_D: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the norm of the chosen rows, (B, K, D)."""
    normed = stream.new_empty(*rows.shape, stream.shape[-1], dtype=dtype)
    launch_rows(stream, rstd, rows, weight_D, offset_D, normed)
    return normed


@stream_rows.register_fake
def _(stream: Tensor, rstd: Tensor, rows: Tensor, *rest: Any) -> Tensor:
    return stream.new_empty(*rows.shape, stream.shape[-1], dtype=rest[-1])


@torch.library.custom_op("steplab::stream_norm_backward", mutates_args=())
def stream_backward(
    d_normed: Tensor,
    slots: Tensor | None,
    d_score: Tensor | None,
    d_stream: Tensor | None,
    stream: Tensor,
    rstd: Tensor,
    weight_D: Tensor,
    offset_D: Tensor | None,
    router_D: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return dx and three sums over all rows, (3, D) in fp32; see the kernel."""
    gradients = (d_normed, slots, d_score, d_stream)
    return launch_backward(*gradients, stream, rstd, weight_D, offset_D, router_D)


@stream_backward.register_fake
def _(
    d_normed: Tensor,
    slots: Any,
    d_score: Any,
    d_stream: Any,
    stream: Tensor,
    rstd: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    return stream.new_empty(stream.shape), rstd.new_empty(3, stream.shape[-1])
