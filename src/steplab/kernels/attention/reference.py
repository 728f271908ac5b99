"""Attention by its definition: scores, mask, softmax in fp32 or better, weighted values."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def refuse(q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> str:
    """The definition takes everything."""
    return ""


def attention(q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v; causal aligns the last query with the last key."""
    scores_BHTS = q_BHTD @ k_BHSD.transpose(-2, -1) / math.sqrt(q_BHTD.shape[-1])
    if causal:
        T, S = scores_BHTS.shape[-2:]
        visible_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTD.device).tril(S - T)
        scores_BHTS = scores_BHTS.masked_fill(~visible_TS, -math.inf)
    at_least_fp32 = torch.promote_types(scores_BHTS.dtype, torch.float32)
    return scores_BHTS.softmax(-1, dtype=at_least_fp32).to(v_BHSD.dtype) @ v_BHSD
