"""Launches the rotation of one tensor of heads."""

# B batch, T tokens, H heads, D head width
from __future__ import annotations

import triton
from torch import Tensor

from steplab.kernels._triton import INTERPRETED, on_device_of
from steplab.kernels.rotary._triton_kernel import rotary_kernel

# The fastest on an H200 over 65,536 tokens of 12 heads of 64: 3.3 TB/s.
TILE = 16 if INTERPRETED else 512  # pairs of numbers that a program rotates
WARPS = 2


def rotate(
    source_BTHD: Tensor,
    target_BTHD: Tensor,
    cos: Tensor,
    sin: Tensor,
    turn: int = 1,
    tile: int = TILE,
    warps: int = WARPS,
) -> None:
    """Write the source to the target, rotated by the angles of its tokens.

    `turn` is 1, -1 for back by them, or 0 for a copy (torch's own takes three times as long where
    the target is a part of a product).
    """
    B, T, H, D = source_BTHD.shape
    if source_BTHD.stride(-1) != 1:
        source_BTHD = source_BTHD.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    padded = triton.next_power_of_2(D // 2)
    rows = max(tile // padded, 1)
    if not source_BTHD.numel():
        return
    with on_device_of(source_BTHD):
        rotary_kernel[(triton.cdiv(T * H, rows), B)](
            *(source_BTHD, target_BTHD, cos, sin),
            *(source_BTHD.stride()[:3], target_BTHD.stride()[:3]),
            *(T * D // 2 if cos.ndim > 2 and cos.shape[0] > 1 else 0, T),
            H=H,
            HALF=D // 2,
            E=padded,
            ROWS=rows,
            TURN=turn,
            UPCAST=INTERPRETED,
            num_warps=warps,
        )
