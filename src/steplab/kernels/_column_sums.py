"""The sum over rows: what each program of a backward found, added up in one fixed order.

Over 528 rows of 2304 torch's sum takes 8.9 us on an H200 and this 3.6; a small model has dozens.
"""

# P rows, D columns; R rows and C columns of a tile
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from steplab.kernels._triton import INTERPRETED, on_device_of

ROWS, COLUMNS, WARPS = (4, 16, 1) if INTERPRETED else (256, 32, 8)


# fmt: off
@triton.jit
def column_sums_kernel(x, sums, P, D, R: tl.constexpr, C: tl.constexpr):
    """Grid: tiles of columns."""
    column_C = tl.program_id(0) * C + tl.arange(0, C)
    sum_RC = tl.zeros([R, C], tl.float32)
    for first in tl.range(0, P, R):
        row_R = first + tl.arange(0, R)
        inside_RC = (row_R < P)[:, None] & (column_C < D)[None, :]
        sum_RC += tl.load(x + row_R[:, None] * D + column_C[None, :], mask=inside_RC, other=0.0)
    tl.store(sums + column_C, tl.sum(sum_RC, 0), mask=column_C < D)
# fmt: on


def column_sums(partial: Tensor) -> Tensor:
    """Return the sum over the first axis of a dense fp32 tensor; it has at least one row."""
    sums = partial.new_empty(partial.shape[1:])
    with on_device_of(partial):
        column_sums_kernel[(triton.cdiv(sums.numel(), COLUMNS),)](
            *(partial, sums, partial.shape[0], sums.numel(), ROWS, COLUMNS), num_warps=WARPS
        )
    return sums
