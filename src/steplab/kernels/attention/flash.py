"""FlashAttention-2 as built into torch, on CUDA for 16-bit inputs and on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.attention import _inputs

HALF = (torch.float16, torch.bfloat16)


def refuse(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> str:
    """Return why it cannot run, or ""."""
    reason = _inputs.simple_inputs(q_BHTD, k_BHSD, causal, documents_BS)
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


def attention(q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> Tensor:
    """Return attention through `aten::_scaled_dot_product_flash_attention[_for_cpu]`."""
    aten = torch.ops.aten
    if q_BHTD.device.type == "cpu":
        op = aten._scaled_dot_product_flash_attention_for_cpu
    else:
        op = aten._scaled_dot_product_flash_attention
    out_BHTD: Tensor = op(q_BHTD, k_BHSD, v_BHSD, 0.0, causal)[0]
    return out_BHTD
