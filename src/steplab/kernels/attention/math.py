"""torch's own unfused composition of matmul, mask, softmax and matmul."""

from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.attention._inputs import AttentionInputs, refuse_for_torch


def refuse(inputs: AttentionInputs) -> str:
    """Return why it cannot run, or ""."""
    return refuse_for_torch(inputs)


def attention(inputs: AttentionInputs) -> Tensor:
    """Return attention through `aten::_scaled_dot_product_attention_math`."""
    q_BHTD, k_BHSD, v_BHSD, causal, _ = inputs
    op = torch.ops.aten._scaled_dot_product_attention_math
    # On CUDA, autocast would turn only some of its steps to fp32, and the backward then fails.
    with torch.autocast(q_BHTD.device.type, enabled=False):
        out_BHTD: Tensor = op(q_BHTD, k_BHSD, v_BHSD, is_causal=causal)[0]
    return out_BHTD
