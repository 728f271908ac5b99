"""torch's choice when the causal mask is passed as a dense tensor: common, and slow.

A mask that is a tensor rules out flash and cuDNN's causal path and computes the pairs that the mask
forbids. It is here to be measured against: `is_causal` says the same at no cost.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from steplab.kernels.attention._inputs import AttentionInputs, refuse_for_torch

NOT_TUNED = "it is here to be measured against"


def refuse(inputs: AttentionInputs) -> str:
    """Return why it cannot run, or ""."""
    if not inputs.causal:
        return "is causal: without a mask it would be torch's own choice"
    return refuse_for_torch(inputs)


def attention(inputs: AttentionInputs) -> Tensor:
    """Return attention by `scaled_dot_product_attention(attn_mask=...)`."""
    q_BHTD, k_BHSD, v_BHSD, _, _ = inputs
    T = q_BHTD.shape[-2]
    mask_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).tril()
    return F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, attn_mask=mask_TT)
