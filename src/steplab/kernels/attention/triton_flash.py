"""FlashAttention-2 in Triton: shared heads, documents, any length, any head width up to 256."""

# B batch, H query heads, G key heads, T queries, S keys, D head width
from __future__ import annotations

from typing import Any

from torch import Tensor

from steplab.kernels._triton import DTYPES, refuse_batch, refuse_device
from steplab.kernels.attention import _limits
from steplab.kernels.attention._flash_op import flash_op

NEEDS_GPU = True


def refuse(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_device(q_BHTD) or refuse_batch(q_BHTD)
    if reason:
        return reason
    if q_BHTD.dtype not in DTYPES:
        return f"needs fp16, bf16 or fp32, not {q_BHTD.dtype}"
    if not q_BHTD.numel():
        return "needs at least one query"
    if q_BHTD.shape[-1] > 256:
        return f"needs a head width of at most 256, not {q_BHTD.shape[-1]}"
    return _limits.flash_inputs(q_BHTD, k_BGSD, v_BGSD, causal, documents_BS)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    from steplab.kernels.attention import _triton_launch

    return _triton_launch.forward(*args)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from steplab.kernels.attention import _triton_launch

    return _triton_launch.backward(*args)


attention = flash_op("triton_flash_attention", _forward, _backward)
