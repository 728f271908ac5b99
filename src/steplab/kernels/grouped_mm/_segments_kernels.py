"""Finds the segments of rows, and adds their parts up."""

# S segments padded to a power of two, R of them that a program places
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels._triton_rounding import narrow


# fmt: off
@triton.jit
def _end(offsets, s, rows, mark, GROUPS: tl.constexpr):
    """Return where a segment ends: at the offset of a group, or, after those, at a mark."""
    offset = tl.load(offsets + s, mask=s < GROUPS, other=0)
    return tl.where(s < GROUPS, offset, tl.minimum((s - GROUPS + 1) * mark, rows))


@triton.jit
def find_segments_kernel(
    offsets, ends, group, rows, mark, GROUPS: tl.constexpr, PIECES: tl.constexpr, S: tl.constexpr,
    R: tl.constexpr,
):
    """Sort the offsets and the multiples of `mark` by counting for each those before it.

    Grid: blocks of R segments.
    """
    s_S, s_R = tl.arange(0, S), tl.program_id(0) * R + tl.arange(0, R)
    end_S = _end(offsets, s_S, rows, mark, GROUPS)
    end_R = _end(offsets, s_R, rows, mark, GROUPS)
    known_S = s_S < GROUPS + PIECES
    earlier = (end_S[None, :] < end_R[:, None]) & known_S[None, :]
    tied = (end_S[None, :] == end_R[:, None]) & (s_S[None, :] < s_R[:, None]) & known_S[None, :]
    rank_R = tl.sum((earlier | tied).to(tl.int32), 1)
    # Where this segment starts: at the largest end that is smaller, or at the same one if tied.
    start_R = tl.max(tl.where(earlier | tied, end_S[None, :], 0), 1)
    # A group that ends at or before the start is behind it.
    is_group_S = s_S < GROUPS
    behind = is_group_S[None, :] & (end_S[None, :] <= start_R[:, None])
    group_R = tl.where(start_R < end_R, tl.sum(behind.to(tl.int32), 1), -1)
    known_R = s_R < GROUPS + PIECES
    tl.store(ends + rank_R, end_R, mask=known_R)
    tl.store(group + rank_R, group_R, mask=known_R)


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
