"""Building blocks of kernels for several ops: rounding, tiles of rows, sums over rows."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steplab.kernels.triton_runtime import INTERPRETED, on_device_of, tl, triton


class Tile(NamedTuple):
    """Rows and (at most) columns that a program works on at a time, and its warps."""

    rows: int
    columns: int
    warps: int


def column_block(width: int, most: int) -> int:
    """Return how many of `width` columns a tile takes: a power of two, `most` or fewer.

    It divides the width where a power of two of at least 128 does, so that no lane is idle.
    """
    dividing = min(width & -width, most)
    return dividing if dividing >= 128 else min(1 << max(width - 1, 0).bit_length(), most)


def fit_tile(tile: Tile, width: int) -> Tile:
    """Return a tile with as many elements for rows of `width`: fewer columns, more rows.

    Otherwise a thread has too little to load at once: only 256 divides 2304 columns, and a tile
    of 1 x 256 moved 2.5 TB/s on an H200 where 1 x 1024 moves 3.8.
    """
    columns = column_block(width, tile.columns)
    return Tile(tile.rows * (tile.columns // columns), columns, tile.warps)


@triton.jit
def narrow(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Return fp32 `x` rounded to `dtype`, to nearest even.

    UPCAST: Triton's interpreter truncates to bf16 instead of rounding, so the bits are rounded
    first.
    """
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


SUM_ROWS, SUM_COLUMNS, SUM_WARPS = (4, 16, 1) if INTERPRETED else (256, 32, 8)


@triton.jit
def column_sums_kernel(x, sums, P, D, R: tl.constexpr, C: tl.constexpr, UPCAST: tl.constexpr):
    """Add up P rows of D columns, R rows by C columns at a time. Grid: tiles of columns."""
    column_C = tl.program_id(0) * C + tl.arange(0, C)
    sum_RC = tl.zeros([R, C], tl.float32)
    for first in tl.range(0, P, R):
        row_R = first + tl.arange(0, R)
        inside_RC = (row_R < P)[:, None] & (column_C < D)[None, :]
        sum_RC += tl.load(x + row_R[:, None] * D + column_C[None, :], mask=inside_RC, other=0.0)
    sum_C = narrow(tl.sum(sum_RC, 0), sums.dtype.element_ty, UPCAST)
    tl.store(sums + column_C, sum_C, mask=column_C < D)


def column_sums(partial: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum over the first axis of a dense fp32 tensor, which has at least one row.

    Sums are rounded once, to `dtype`. It adds up what the programs of a backward found, always in
    the same order. For 528 rows of 2304, torch's sum takes 8.9 us on an H200 and this 3.6; a small
    model has dozens of them.
    """
    sums = partial.new_empty(partial.shape[1:], dtype=dtype)
    with on_device_of(partial):
        column_sums_kernel[(triton.cdiv(sums.numel(), SUM_COLUMNS),)](
            partial, sums, partial.shape[0], sums.numel(), SUM_ROWS, SUM_COLUMNS,
            UPCAST=INTERPRETED, num_warps=SUM_WARPS,
        )  # fmt: skip
    return sums
