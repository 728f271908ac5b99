"""torch's own grouped product: on Hopper in bf16 one CUTLASS kernel without a host sync.

The weight gradient x^T dout of a group is a sum as long as the group has rows. When one expert
takes a third of them, most of the GPU idles while that sum is computed: on an H200, 131,072 rows of
8 experts as a fresh router fills them take 1.42 ms instead of 0.95. So rows are also cut at every
PIECES-th of their number, into segments of about equal length, and the parts are added in fp32.
"""

# E groups, K and N widths, S segments (in a kernel padded to a power of two), R segments that a
# program finds
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    on_device_of,
    tl,
    triton,
    use_triton,
)

PIECES = 16
FOUND = 32  # segments of one program: compared with all of 255 experts in 128 registers
SUM_BLOCK = 64 if INTERPRETED else 2048
SUM_WARPS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TAGS = ()


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
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    total = tl.zeros([BLOCK], tl.float32)
    part = parts + offset
    for segment in tl.range(SEGMENTS):
        if tl.load(group + segment) == own:
            total += tl.load(part, mask=inside, other=0.0).to(tl.float32)
        part += size
    target = out + own.to(tl.int64) * size + offset
    tl.store(target, narrow(total, out.dtype.element_ty, UPCAST), mask=inside)
# fmt: on


def find_segments(offsets_E: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return (ends_S, group_S), int32: where each segment ends, and its group (-1 if empty).

    S is PIECES + E whatever the offsets are, so shapes are static and nothing is read on the host.
    """

    groups = offsets_E.shape[0]
    count = groups + PIECES
    ends_S, group_S = offsets_E.new_empty(count), offsets_E.new_empty(count)
    with on_device_of(offsets_E):
        find_segments_kernel[(triton.cdiv(count, FOUND),)](
            offsets_E, ends_S, group_S, rows, triton.cdiv(rows, PIECES), groups, PIECES,
            S=triton.next_power_of_2(count), R=FOUND,
        )  # fmt: skip
    return ends_S, group_S


def add_segments(parts_SKN: Tensor, group_S: Tensor, groups: int) -> Tensor:
    """Return (E, K, N): the sum of each group's segments, in fp32 until it is rounded."""
    S, K, N = parts_SKN.shape
    out_EKN = parts_SKN.new_empty(groups, K, N)
    with on_device_of(parts_SKN):
        add_segments_kernel[(triton.cdiv(K * N, SUM_BLOCK), groups)](
            parts_SKN, group_S, out_EKN, K * N, S, SUM_BLOCK, INTERPRETED, num_warps=SUM_WARPS
        )
    return out_EKN


def refuse(x_RK: Tensor, w_EKN: Tensor) -> str:
    """Return why it cannot run, or ""."""
    if x_RK.dtype not in DTYPES:
        return f"needs bf16, fp16 or fp32, not {x_RK.dtype}"
    # Elsewhere torch's op reads the offsets on the host and multiplies group by group: `loop`
    # does that under its own name.
    on_cuda = x_RK.device.type == "cuda"
    if on_cuda and x_RK.dtype != torch.bfloat16:
        return f"needs bf16 on CUDA, not {x_RK.dtype}"
    if on_cuda and torch.cuda.get_device_capability(x_RK.device) < (9, 0):
        return "needs compute capability 9.0 or newer"
    row_bytes = x_RK.element_size()
    if x_RK.shape[-1] * row_bytes % 16 or w_EKN.shape[-1] * row_bytes % 16:
        return f"needs rows of a multiple of 16 bytes, not {tuple(w_EKN.shape[1:])} elements"
    return ""


def product(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (R, N)."""
    return F.grouped_mm(x_RK, w_EKN, offs=offsets_E)


def weight_gradient(x_RK: Tensor, dout_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (E, K, N)."""
    if not use_triton(x_RK):
        return F.grouped_mm(x_RK.transpose(0, 1), dout_RN, offs=offsets_E)
    ends_S, group_S = find_segments(offsets_E, x_RK.shape[0])
    parts_SKN = F.grouped_mm(x_RK.transpose(0, 1), dout_RN, offs=ends_S)
    return add_segments(parts_SKN, group_S, offsets_E.shape[0])
