"""Each of q and k in one pass, and in the backward straight into the product's gradient.

torch's own backward of the split would copy the three gradients into one tensor once more.
torch.compile sees opaque ops.
"""

# B batch, T tokens, H heads, D head width
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steplab.kernels._triton import DTYPES, refuse_batch, refuse_device

WIDEST = 512  # of a head
NEEDS_GPU = True


def refuse(qkv_BT3HD: Tensor, cos: Tensor) -> str:
    """Return why it cannot run, or ""."""
    if qkv_BT3HD.dtype not in DTYPES or cos.dtype != torch.float32:
        return f"needs fp16, bf16 or fp32 and fp32 angles, not {qkv_BT3HD.dtype} and {cos.dtype}"
    B, T, _, _, D = qkv_BT3HD.shape
    if D > WIDEST:
        return f"needs a head width of at most {WIDEST}, not {D}"
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
    from steplab.kernels.rotary import _triton_launch

    q_BTHD, k_BTHD = empty_heads(qkv_BT3HD), empty_heads(qkv_BT3HD)
    for part, target_BTHD in enumerate((q_BTHD, k_BTHD)):
        _triton_launch.rotate(qkv_BT3HD[:, :, part], target_BTHD, cos, sin)
    return q_BTHD, k_BTHD


@torch.library.custom_op("steplab::rotary_backward", mutates_args=())
def _backward(
    dq_BHTD: Tensor, dk_BHTD: Tensor, dv_BHTD: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    from steplab.kernels.rotary import _triton_launch

    dqkv_BT3HD = empty_product(dq_BHTD)
    for part, (d_BHTD, turn) in enumerate(((dq_BHTD, -1), (dk_BHTD, -1), (dv_BHTD, 0))):
        target_BTHD = dqkv_BT3HD[:, :, part]
        _triton_launch.rotate(d_BHTD.transpose(1, 2), target_BTHD, cos, sin, turn)
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
