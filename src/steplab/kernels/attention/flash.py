"""FlashAttention-2 as built into torch, on CUDA for 16-bit inputs and on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.attention._inputs import AttentionInputs, refuse_for_torch

HALF = (torch.float16, torch.bfloat16)


def refuse(inputs: AttentionInputs) -> str:
    """Return why it cannot run, or ""."""
    q_BHTD = inputs.q_BHTD
    reason = refuse_for_torch(inputs)
    if reason:
        return reason
    if q_BHTD.device.type == "cpu":
        return ""
    if q_BHTD.device.type != "cuda":
        return f"needs cuda or cpu, not {q_BHTD.device.type}"
    if torch.cuda.get_device_capability(q_BHTD.device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    if q_BHTD.dtype not in HALF:
        return f"needs fp16 or bf16 on CUDA, not {q_BHTD.dtype}"
    if q_BHTD.shape[-1] % 8 or q_BHTD.shape[-1] > 256:
        return f"needs a head width that is a multiple of 8 up to 256, not {q_BHTD.shape[-1]}"
    return ""


def attention(inputs: AttentionInputs) -> Tensor:
    """Return attention through `aten::_scaled_dot_product_flash_attention[_for_cpu]`."""
    q_BHTD, k_BHSD, v_BHSD, causal, _ = inputs
    aten = torch.ops.aten
    if q_BHTD.device.type == "cpu":
        op = aten._scaled_dot_product_flash_attention_for_cpu
    else:
        op = aten._scaled_dot_product_flash_attention
    out_BHTD: Tensor = op(q_BHTD, k_BHSD, v_BHSD, 0.0, causal)[0]
    return out_BHTD
