"""Queries and keys rotated in one pass each; the backward writes into the product's gradient.

torch's own backward of the split would copy the three gradients into one tensor once more.
torch.compile sees opaque ops.
"""

# B batch, T tokens, H heads, D head width; in the kernel R heads of a tile, neighbors of one token
# and of the next, and E half the head width, padded to a power of two
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels.triton_blocks import narrow
from steplab.kernels.triton_runtime import (
    INTERPRETED,
    on_device_of,
    refuse_batch,
    refuse_device,
    refuse_dtype,
    tl,
    triton,
)

NEEDS_GPU = True
MAX_WIDTH = 512  # largest head width
# The fastest on an H200 over 65,536 tokens of 12 heads of 64: 3.3 TB/s.
TILE = 16 if INTERPRETED else 512  # pairs of numbers that a program rotates
WARPS = 2


# fmt: off
@triton.jit
def rotary_kernel(
    source, target, cos, sin, source_strides, target_strides, angle_stride, T, H: tl.constexpr,
    HALF: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rotate ROWS heads by the angles of their tokens (TURN 1), back by them (-1), or not at all
    (0: a copy). Grid: tiles, batch.

    The strides are those of (B, T, H); the stride within a head is 1.
    """
    batch = tl.program_id(1).to(tl.int64)
    row_R1 = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    e_1E = tl.arange(0, E)[None, :]
    token_R1, head_R1 = (row_R1 // H).to(tl.int64), row_R1 % H
    inside_RE = (row_R1 < T * H) & (e_1E < HALF)
    head_R1 = head_R1.to(tl.int64)
    offset_R1 = token_R1 * source_strides[1] + head_R1 * source_strides[2]
    from_RE = source + batch * source_strides[0] + (offset_R1 + e_1E)
    left_RE = tl.load(from_RE, mask=inside_RE, other=0.0).to(tl.float32)
    right_RE = tl.load(from_RE + HALF, mask=inside_RE, other=0.0).to(tl.float32)
    offset_R1 = token_R1 * target_strides[1] + head_R1 * target_strides[2]
    to_RE = target + batch * target_strides[0] + (offset_R1 + e_1E)
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
# fmt: on


def launch_rotation(
    source_BTHD: Tensor,
    target_BTHD: Tensor,
    cos: Tensor,
    sin: Tensor,
    turn: int = 1,
    tile: int = TILE,
    warps: int = WARPS,
) -> None:
    """Write the source to the target, rotated by the angles of its tokens.

    `turn` is 1, or -1 to rotate back, or 0 for a copy. (torch's own copy takes three times as long
    where the target is one third of a product.)
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
            source_BTHD, target_BTHD, cos, sin, source_BTHD.stride()[:3],
            target_BTHD.stride()[:3], T * D // 2 if cos.ndim > 2 and cos.shape[0] > 1 else 0, T,
            H=H, HALF=D // 2, E=padded, ROWS=rows, TURN=turn, UPCAST=INTERPRETED, num_warps=warps,
        )  # fmt: skip


def refuse(qkv_BT3HD: Tensor, cos: Tensor) -> str:
    """Return why it cannot run, or ""."""
    if refuse_dtype(qkv_BT3HD) or cos.dtype != torch.float32:
        return f"needs fp16, bf16 or fp32 and fp32 angles, not {qkv_BT3HD.dtype} and {cos.dtype}"
    B, T, _, _, D = qkv_BT3HD.shape
    if D > MAX_WIDTH:
        return f"needs a head width of at most {MAX_WIDTH}, not {D}"
    if D % 2 or tuple(cos.shape) not in ((T, D // 2), (1, 1, T, D // 2), (B, 1, T, D // 2)):
        return "needs angles of (T, D / 2), (B, 1, T, D / 2) or (1, 1, T, D / 2), and an even D"
    return refuse_batch(qkv_BT3HD) or refuse_device(qkv_BT3HD)


def rotary(qkv_BT3HD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, (B, H, T, D) each; in memory all are (B, T, H, D)."""
    out: tuple[Tensor, Tensor, Tensor] = _Rotary.apply(qkv_BT3HD, cos, sin)
    return out


class _Rotary(torch.autograd.Function):
    """The values pass through, so that the backward writes the gradient of the whole product."""

    @staticmethod
    def forward(
        ctx: Any, qkv_BT3HD: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        q_BTHD, k_BTHD = _forward(qkv_BT3HD, cos, sin)
        v_BTHD = qkv_BT3HD[:, :, 2]
        return q_BTHD.transpose(1, 2), k_BTHD.transpose(1, 2), v_BTHD.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _backward(*gradients, *ctx.saved_tensors), None, None


@torch.library.custom_op("steplab::rotary", mutates_args=())
def _forward(qkv_BT3HD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q_BTHD, k_BTHD = empty_heads(qkv_BT3HD), empty_heads(qkv_BT3HD)
    for part, target_BTHD in enumerate((q_BTHD, k_BTHD)):
        launch_rotation(qkv_BT3HD[:, :, part], target_BTHD, cos, sin)
    return q_BTHD, k_BTHD


@torch.library.custom_op("steplab::rotary_backward", mutates_args=())
def _backward(
    dq_BHTD: Tensor, dk_BHTD: Tensor, dv_BHTD: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    dqkv_BT3HD = empty_product(dq_BHTD)
    for part, (d_BHTD, turn) in enumerate(((dq_BHTD, -1), (dk_BHTD, -1), (dv_BHTD, 0))):
        target_BTHD = dqkv_BT3HD[:, :, part]
        launch_rotation(d_BHTD.transpose(1, 2), target_BTHD, cos, sin, turn)
    return dqkv_BT3HD


def empty_heads(qkv_BT3HD: Tensor) -> Tensor:
    """Return an empty (B, T, H, D)."""
    B, T, _, H, D = qkv_BT3HD.shape
    return qkv_BT3HD.new_empty(B, T, H, D)


def empty_product(x_BHTD: Tensor) -> Tensor:
    """Return an empty (B, T, 3, H, D)."""
    B, H, T, D = x_BHTD.shape
    return x_BHTD.new_empty(B, T, 3, H, D)


@_forward.register_fake
def _(qkv_BT3HD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return empty_heads(qkv_BT3HD), empty_heads(qkv_BT3HD)


@_backward.register_fake
def _(dq_BHTD: Tensor, dk_BHTD: Tensor, dv_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return empty_product(dq_BHTD)
