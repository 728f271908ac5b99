"""Launches the Triton kernels of the norm."""

# D width, P programs of the backward
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from steplab.kernels._column_sums import column_sums
from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels.rms_norm._triton_kernels import (
    rms_norm_backward_kernel,
    rms_norm_forward_kernel,
)
from steplab.kernels.rms_norm.triton_norm import empty_outputs


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its rows; `programs` per multiprocessor and `stages`: backward only."""

    rows: int
    warps: int
    programs: int = 8
    stages: int = 1


def tilings(width: int) -> tuple[Tiling, Tiling]:
    """Return the tilings of forward and backward for a padded width.

    A fixed choice, so that the same input always runs the same kernel. For a width of 768 it is
    the fastest on an H200: 4.0 and 3.2 TB/s over 65,536 rows (`benchmarks/norms_kernels.py`).
    """
    if INTERPRETED:
        return Tiling(4, 1), Tiling(2, 1, programs=2)
    warps = max(width // 512, 4)
    # Loads ahead of time go through shared memory: three rows of each stage.
    stages = 2 if width <= 4096 else 1
    backward = Tiling(max(2048 // width, 1), warps, programs=4, stages=stages)
    return Tiling(max(4096 // width, 1), warps), backward


def padded_width(width: int) -> int:
    """Return the row length that a kernel computes with: a power of two."""
    return max(16, triton.next_power_of_2(width))


def forward(
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
                *(x, added, weight_D.contiguous(), normed, stream, rstd, rows, eps),
                WIDTH=width,
                D=padded_width(width),
                ROWS=tiling.rows,
                ADDED=added is not None,
                UPCAST=INTERPRETED,
                num_warps=tiling.warps,
            )
    return normed, stream, rstd


def backward(
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
    programs = max(1, min(triton.cdiv(rows, tiling.rows), tiling.programs * processors(stream)))
    dx, partial_PD = torch.empty_like(stream), rstd.new_empty(programs, width)
    with on_device_of(stream):
        rms_norm_backward_kernel[(programs,)](
            *(d_normed, d_stream, stream, weight_D.contiguous(), rstd, dx, partial_PD, rows),
            WIDTH=width,
            D=padded_width(width),
            ROWS=tiling.rows,
            PASSED=d_stream is not None,
            STAGES=tiling.stages,
            UPCAST=INTERPRETED,
            num_warps=tiling.warps,
        )
    return dx, column_sums(partial_PD).to(weight_D.dtype)


def processors(x: Tensor) -> int:
    """Return the number of multiprocessors that work on `x`; a CPU counts as one."""
    if not x.is_cuda:
        return 1
    return torch.cuda.get_device_properties(x.device).multi_processor_count
