"""The memory-efficient (CUTLASS) kernel built into torch: the fused one that takes fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.attention._inputs import AttentionInputs, refuse_for_torch

NEEDS_GPU = True


def refuse(inputs: AttentionInputs) -> str:
    """Return why it cannot run, or ""."""
    q_BHTD = inputs.q_BHTD
    if q_BHTD.device.type != "cuda":
        return f"needs cuda, not {q_BHTD.device.type}"
    if q_BHTD.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"needs fp16, bf16 or fp32, not {q_BHTD.dtype}"
    # 16-byte loads: 4 fp32 or 8 half elements.
    if q_BHTD.shape[-1] * q_BHTD.element_size() % 16:
        return f"needs head rows of a multiple of 16 bytes, not width {q_BHTD.shape[-1]}"
    return refuse_for_torch(inputs)


def attention(inputs: AttentionInputs) -> Tensor:
    """Return attention through `aten::_scaled_dot_product_efficient_attention`."""
    q_BHTD, k_BHSD, v_BHSD, causal, _ = inputs
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    keeps_logsumexp = q_BHTD.requires_grad or k_BHSD.requires_grad or v_BHSD.requires_grad
    out_BHTD: Tensor = op(q_BHTD, k_BHSD, v_BHSD, None, keeps_logsumexp, 0.0, causal)[0]
    return out_BHTD
