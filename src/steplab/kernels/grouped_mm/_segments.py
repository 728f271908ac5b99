"""Weight gradients in pieces of even length, so that a crowded group keeps no other waiting.

The product x^T dout of a group is as long as the group has rows. With an expert that takes a third
of them, most of the GPU has nothing to do while it is multiplied: on an H200, 131,072 rows of 8
experts as a fresh router fills them, 1.42 ms instead of 0.95. Cut at every PIECES-th of the rows as
well as between groups, no product is longer than another can be; the parts are added up in fp32.
"""

# E groups, S segments, K and N widths
from __future__ import annotations

from torch import Tensor

from steplab.kernels._triton import INTERPRETED, on_device_of

PIECES = 16
FOUND = 32  # segments that a program finds: against all of 255 experts in 128 registers
BLOCK = 64 if INTERPRETED else 2048
WARPS = 8


def find_segments(offsets_E: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return (ends_S, group_S), int32: where each segment ends, and its group; -1: it is empty.

    S is PIECES + E whatever the offsets are, so shapes stay and nothing is read on the host.
    """
    import triton

    from steplab.kernels.grouped_mm._segments_kernels import find_segments_kernel

    groups = offsets_E.shape[0]
    count = groups + PIECES
    ends_S, group_S = offsets_E.new_empty(count), offsets_E.new_empty(count)
    with on_device_of(offsets_E):
        find_segments_kernel[(triton.cdiv(count, FOUND),)](
            *(offsets_E, ends_S, group_S, rows, triton.cdiv(rows, PIECES), groups, PIECES),
            S=triton.next_power_of_2(count),
            R=FOUND,
        )
    return ends_S, group_S


def add_segments(parts_SKN: Tensor, group_S: Tensor, groups: int) -> Tensor:
    """Return (E, K, N): the sum of each group's segments, in fp32 until it is rounded."""
    import triton

    from steplab.kernels.grouped_mm._segments_kernels import add_segments_kernel

    S, K, N = parts_SKN.shape
    out_EKN = parts_SKN.new_empty(groups, K, N)
    with on_device_of(parts_SKN):
        add_segments_kernel[(triton.cdiv(K * N, BLOCK), groups)](
            *(parts_SKN, group_S, out_EKN, K * N, S, BLOCK, INTERPRETED), num_warps=WARPS
        )
    return out_EKN
