"""torch's own unfused composition of matmul, mask, softmax and matmul."""

from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.attention import _inputs


def refuse(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> str:
    """Return why it cannot run, or ""."""
    return _inputs.simple_inputs(q_BHTD, k_BHSD, causal, documents_BS)


def attention(q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> Tensor:
    """Return attention through `aten::_scaled_dot_product_attention_math`."""
    op = torch.ops.aten._scaled_dot_product_attention_math
    # On CUDA, autocast would turn only some of its steps to fp32, and the backward then fails.
    with torch.autocast(q_BHTD.device.type, enabled=False):
        out_BHTD: Tensor = op(q_BHTD, k_BHSD, v_BHSD, is_causal=causal)[0]
    return out_BHTD
