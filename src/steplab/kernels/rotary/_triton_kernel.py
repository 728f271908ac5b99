"""The kernel that rotates heads, from any layout into any other."""

# R rows of a tile: neighbouring heads of neighbouring tokens; E half the head width, padded to a
# power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from steplab.kernels._triton_rounding import narrow


# fmt: off
@triton.jit
def rotary_kernel(
    source, target, cos, sin, source_strides, target_strides, angle_stride, T, H: tl.constexpr,
    HALF: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rotate ROWS heads by the angles of their tokens (TURN 1), back by them (-1), or not at all
    (0: a copy). Grid: tiles, batch.

    The strides are those of (B, T, H); along a head the step is 1.
    """
    batch = tl.program_id(1).to(tl.int64)
    row_R1 = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    e_1E = tl.arange(0, E)[None, :]
    token_R1, head_R1 = (row_R1 // H).to(tl.int64), row_R1 % H
    inside_RE = (row_R1 < T * H) & (e_1E < HALF)
    head_R1 = head_R1.to(tl.int64)
    place_R1 = token_R1 * source_strides[1] + head_R1 * source_strides[2]
    from_RE = source + batch * source_strides[0] + (place_R1 + e_1E)
    left_RE = tl.load(from_RE, mask=inside_RE, other=0.0).to(tl.float32)
    right_RE = tl.load(from_RE + HALF, mask=inside_RE, other=0.0).to(tl.float32)
    place_R1 = token_R1 * target_strides[1] + head_R1 * target_strides[2]
    to_RE = target + batch * target_strides[0] + (place_R1 + e_1E)
    dtype = target.dtype.element_ty
    if TURN != 0:
        angle_RE = batch * angle_stride + token_R1 * HALF + e_1E
        cos_RE = tl.load(cos + angle_RE, mask=inside_RE, other=0.0)
        sin_RE = tl.load(sin + angle_RE, mask=inside_RE, other=0.0) * TURN
        turned_RE = left_RE * cos_RE - right_RE * sin_RE
        right_RE = right_RE * cos_RE + left_RE * sin_RE
        left_RE = turned_RE
    tl.store(to_RE, narrow(left_RE, dtype, UPCAST), mask=inside_RE)
    tl.store(to_RE + HALF, narrow(right_RE, dtype, UPCAST), mask=inside_RE)
