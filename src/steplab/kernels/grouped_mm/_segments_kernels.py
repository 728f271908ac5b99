"""Finds the segments of rows, and adds their parts up."""

# S segments padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels.attention._triton_tile import narrow


# fmt: off
@triton.jit
def find_segments_kernel(
    offsets, ends, group, rows, mark, GROUPS: tl.constexpr, PIECES: tl.constexpr, S: tl.constexpr,
):
    """Sort the offsets and the multiples of `mark` by counting for each those before it."""
    s_S = tl.arange(0, S)
    offset_S = tl.load(offsets + s_S, mask=s_S < GROUPS, other=0)
    end_S = tl.where(s_S < GROUPS, offset_S, tl.minimum((s_S - GROUPS + 1) * mark, rows))
    known_S = s_S < GROUPS + PIECES
    end_S = tl.where(known_S, end_S, rows)
    earlier = (end_S[None, :] < end_S[:, None]) & known_S[None, :]
    tied = (end_S[None, :] == end_S[:, None]) & (s_S[None, :] < s_S[:, None]) & known_S[None, :]
    rank_S = tl.sum((earlier | tied).to(tl.int32), 1)
    # Where this segment starts: at the largest end that is smaller, or at the same one if tied.
    start_S = tl.max(tl.where(earlier | tied, end_S[None, :], 0), 1)
    # A group that ends at or before the start is behind it.
    is_group_S = s_S < GROUPS
    behind = is_group_S[None, :] & (end_S[None, :] <= start_S[:, None])
    group_S = tl.where(start_S < end_S, tl.sum(behind.to(tl.int32), 1), -1)
    tl.store(ends + rank_S, end_S, mask=known_S)
    tl.store(group + rank_S, group_S, mask=known_S)


@triton.jit
def add_segments_kernel(
    parts, group, out, size, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):
    """Write one block of one group's sum. Grid: blocks, groups."""
    own = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    part = parts + place
    for segment in tl.range(SEGMENTS):
        if tl.load(group + segment) == own:
            total += tl.load(part, mask=inside, other=0.0).to(tl.float32)
        part += size
    target = out + own.to(tl.int64) * size + place
    tl.store(target, narrow(total, out.dtype.element_ty, UPCAST), mask=inside)
