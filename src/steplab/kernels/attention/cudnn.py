"""cuDNN's fused attention: the fastest of torch's own on Hopper."""

from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.attention._inputs import AttentionInputs, refuse_for_torch

# Asked once, here: torch.compile cannot trace the question.
HAS_CUDNN = torch.backends.cudnn.is_available()
NEEDS_GPU = True


def refuse(inputs: AttentionInputs) -> str:
    """Return why it cannot run, or ""."""
    q_BHTD = inputs.q_BHTD
    if q_BHTD.device.type != "cuda" or torch.version.cuda is None:
        return f"needs an NVIDIA GPU, not {q_BHTD.device.type}"
    if not HAS_CUDNN:
        return "needs a torch build with cuDNN"
    if torch.cuda.get_device_capability(q_BHTD.device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    if q_BHTD.dtype not in (torch.float16, torch.bfloat16):
        return f"needs fp16 or bf16, not {q_BHTD.dtype}"
    if q_BHTD.shape[-1] % 8 or q_BHTD.shape[-1] > 128:
        return f"needs a head width that is a multiple of 8 up to 128, not {q_BHTD.shape[-1]}"
    return refuse_for_torch(inputs)


def attention(inputs: AttentionInputs) -> Tensor:
    """Return attention through `aten::_scaled_dot_product_cudnn_attention`."""
    q_BHTD, k_BHSD, v_BHSD, causal, _ = inputs
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    keeps_logsumexp = q_BHTD.requires_grad or k_BHSD.requires_grad or v_BHSD.requires_grad
    out_BHTD: Tensor = op(q_BHTD, k_BHSD, v_BHSD, None, keeps_logsumexp, 0.0, causal)[0]
    return out_BHTD
