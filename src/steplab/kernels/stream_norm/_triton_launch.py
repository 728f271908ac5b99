"""Launches the Triton kernels of the stream's norm."""

# B batch, S rows of a sequence, K rows taken, D width, P programs of the backward
from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from steplab.kernels._column_sums import column_sums
from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels.rms_norm._triton_launch import (
    Tiling,
    padded_width,
    processors,
    tilings,
)
from steplab.kernels.stream_norm._triton_kernels import (
    stream_rms_norm_backward_kernel,
    stream_rms_norm_forward_kernel,
    stream_rms_norm_rows_kernel,
)


def forward(
    x_BSD: Tensor,
    added: Tensor | None,
    places_BS: Tensor | None,
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
                *(x_BSD.contiguous(), _dense(added), _dense(places_BS), *vectors, *outputs),
                *(rows, eps, *_lengths(x_BSD, added, places_BS)),
                WIDTH=width,
                D=padded_width(width),
                ROWS=tiling.rows,
                UPCAST=INTERPRETED,
                num_warps=tiling.warps,
            )


def rows(
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
                *(stream_BSD, rstd_BS, _dense(rows_BK), _dense(weight_D), _dense(offset_D)),
                *(normed_BKD, rows_BK.numel(), length, rows_BK.shape[1]),
                WIDTH=width,
                D=padded_width(width),
                ROWS=tiling.rows,
                UPCAST=INTERPRETED,
                num_warps=tiling.warps,
            )


def backward(
    d_normed: Tensor,
    places_BS: Tensor | None,
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
    length, taken = _lengths(stream_BSD, d_normed, places_BS)
    tiling = _backward_tiling(width)
    count = rstd_BS.numel()
    programs = min(triton.cdiv(count, tiling.rows), tiling.programs * processors(stream_BSD))
    partial_P3D = rstd_BS.new_empty(max(1, programs), 3, width)
    dx_BSD = torch.empty_like(stream_BSD)
    gradients = (_dense(t) for t in (d_normed, places_BS, d_score_BS, d_stream_BSD))
    vectors = (_dense(t) for t in (weight_D, offset_D, router_D))
    with on_device_of(stream_BSD):
        stream_rms_norm_backward_kernel[(len(partial_P3D),)](
            *(*gradients, stream_BSD, rstd_BS, *vectors, dx_BSD, partial_P3D, count),
            LENGTH=length,
            TAKEN=taken,
            WIDTH=width,
            D=padded_width(width),
            ROWS=tiling.rows,
            STAGES=tiling.stages,
            UPCAST=INTERPRETED,
            num_warps=tiling.warps,
        )
    return dx_BSD, column_sums(partial_P3D)


def _lengths(x_BSD: Tensor, taken: Tensor | None, places_BS: Tensor | None) -> tuple[int, int]:
    """Return rows and taken rows of a sequence, of which there is a kernel for each.

    Where no rows are chosen nobody asks, and lengths that vary must not compile one after another.
    """
    if taken is None or places_BS is None:
        return 1, 1
    return x_BSD.shape[-2], taken.shape[-2]


def _backward_tiling(width: int) -> Tiling:
    """Return the backward's own tiling: it reads more than a norm's, so three loads ahead pay.

    Over 16 x 1024 rows of 768, half of them chosen, 37 us with the sums on an H200, where the
    norm's tiling takes 65.
    """
    usual = tilings(padded_width(width))[1]
    return usual if INTERPRETED else replace(usual, programs=3, stages=usual.stages + 1)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
