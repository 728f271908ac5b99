"""What the kernels of norms share: how rows are cut, and the stream that passes through a norm.

A row stays in registers. x, or x plus what is added to it, is the stream: it is normed and passed
on, so that all of its gradient arrives in one backward.
"""

# D width (in the kernels padded to a power of two), R rows of a tile
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    multiprocessors,
    refuse_device,
    refuse_dtype,
    tl,
    triton,
)

MAX_WIDTH = 8192  # a row stays in registers: 16 numbers in each of 512 threads


@dataclass(frozen=True)
class Tiling:
    """How a kernel cuts its rows."""

    rows: int
    warps: int
    programs: int = 8  # of the backward, per multiprocessor
    stages: int = 1  # of the backward's loop


def tilings(width: int) -> tuple[Tiling, Tiling]:
    """Return the tilings of forward and backward for a padded width.

    A fixed choice, so that the same input always runs the same kernel. For a width of 768 it is
    the fastest on an H200: 4.0 and 4.1 TB/s over 65,536 rows (`benchmarks/norms_kernels.py`).
    """
    if INTERPRETED:
        return Tiling(4, 1), Tiling(2, 1, programs=2)
    warps = max(width // 512, 4)
    # Loads ahead of time go through shared memory: three rows of each stage. Fewer programs with
    # more loads under way: 16,384 rows of 768 took 27.4 us, 31.5 with two stages and four programs;
    # of 2048 67.0 and 69.0, and of 4096, with two stages, 132 and 151 (RMSNorm, on an H200).
    stages = 3 if width <= 2048 else 2 if width <= 4096 else 1
    backward = Tiling(max(2048 // width, 1), warps, programs=3, stages=stages)
    return Tiling(max(4096 // width, 1), warps), backward


def padded_width(width: int) -> int:
    """Return the row length that a kernel computes with: a power of two."""
    return max(16, triton.next_power_of_2(width))


def backward_programs(tiling: Tiling, rows: int, stream: Tensor) -> int:
    """Return how many programs share the rows of a backward; at least one."""
    most = tiling.programs * multiprocessors(stream)
    return max(1, min(triton.cdiv(rows, tiling.rows), most))


def refuse_rows(x: Tensor, added: Tensor | None, *vectors: Tensor | None) -> str:
    """Return why kernels cannot take these rows with these weights and biases, or ""."""
    reason = refuse_dtype(x, *vectors, added)
    if reason:
        return reason
    if any(vector is not None and vector.shape != x.shape[-1:] for vector in vectors):
        return "needs a weight (and a bias) as wide as the rows"
    if added is not None and added.shape != x.shape:
        return "needs an addition of the shape of the rows"
    if x.shape[-1] > MAX_WIDTH:
        return f"needs rows of at most {MAX_WIDTH} numbers, not {x.shape[-1]}"
    return refuse_device(x)


def empty_outputs(
    x: Tensor, added: Tensor | None, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized normed, stream and one number per row, in fp32.

    Without `added` there is no new stream: the second is `x` itself.
    """
    stream = x
    if added is not None:
        stream = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, added.dtype))
    normed = x.new_empty(x.shape, dtype=dtype or stream.dtype)
    return normed, stream, x.new_empty(x.shape[:-1], dtype=torch.float32)


def split_gradient(
    d_stream: Tensor | None, dtypes: tuple[torch.dtype, torch.dtype | None]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of what was added, each in its dtype; None for no addition."""
    dx, d_added = (
        None if d_stream is None or dtype is None else d_stream.to(dtype) for dtype in dtypes
    )
    return dx, d_added


# fmt: off
@triton.jit
def load_stream(
    x, added, stream, origin, offset_RD, inside_RD, ADDED: tl.constexpr, UPCAST: tl.constexpr,
):
    """Return a tile of the stream in fp32; if ADDED, it is the sum as rounded, which is stored."""
    x_RD = tl.load(x + origin + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
    if ADDED:
        added_RD = tl.load(added + origin + offset_RD, mask=inside_RD, other=0.0).to(tl.float32)
        rounded_RD = narrow(x_RD + added_RD, stream.dtype.element_ty, UPCAST)
        tl.store(stream + origin + offset_RD, rounded_RD, mask=inside_RD)
        x_RD = rounded_RD.to(tl.float32)
    return x_RD


@triton.jit
def store_gradient(
    dx, d_stream, dx_RD, origin, offset_RD, inside_RD, PASSED: tl.constexpr, UPCAST: tl.constexpr,
):
    """Store a tile of the stream's gradient; if PASSED, what came through the stream is added."""
    if PASSED:
        passed_RD = tl.load(d_stream + origin + offset_RD, mask=inside_RD, other=0.0)
        dx_RD += passed_RD.to(tl.float32)
    target_RD = narrow(dx_RD, dx.dtype.element_ty, UPCAST)
    tl.store(dx + origin + offset_RD, target_RD, mask=inside_RD)
# fmt: on
