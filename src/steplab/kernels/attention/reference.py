"""The definition of attention: scores, mask, softmax in fp32 or better, weighted values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from steplab.kernels.attention._inputs import AttentionInputs, document_of


def attention(inputs: AttentionInputs) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v."""
    q_BHTD, k_BHSD, v_BHSD, causal, documents_BS = inputs
    if q_BHTD.shape[1] != k_BHSD.shape[1]:
        sharing = q_BHTD.shape[1] // k_BHSD.shape[1]
        k_BHSD, v_BHSD = (x.repeat_interleave(sharing, 1) for x in (k_BHSD, v_BHSD))
    scores_BHTS = q_BHTD @ k_BHSD.transpose(-2, -1) / math.sqrt(q_BHTD.shape[-1])
    T, S = scores_BHTS.shape[-2:]
    if causal:
        visible_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTD.device).tril(S - T)
        scores_BHTS = scores_BHTS.masked_fill(~visible_TS, -math.inf)
    if documents_BS is not None:
        document_BS = document_of(documents_BS)
        other_BTS = document_BS[:, S - T :, None] != document_BS[:, None]
        scores_BHTS = scores_BHTS.masked_fill(other_BTS[:, None], -math.inf)
    at_least_fp32 = torch.promote_types(scores_BHTS.dtype, torch.float32)
    return scores_BHTS.softmax(-1, dtype=at_least_fp32).to(v_BHSD.dtype) @ v_BHSD
