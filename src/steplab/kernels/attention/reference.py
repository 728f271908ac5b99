"""Attention by its definition: scores, mask, softmax in fp32 or better, weighted values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from steplab.kernels.attention._inputs import document_of


def refuse(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> str:
    """The definition takes everything."""
    return ""


def attention(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    causal: bool,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v; the last query stands at the last key.

    With fewer key heads than query heads, each is shared by as many neighbours. With documents, a
    query sees the keys of its own one only.
    """
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
