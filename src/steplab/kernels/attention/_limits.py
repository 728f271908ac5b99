"""Reasons to refuse that several implementations share; "" means no objection."""

from __future__ import annotations

from torch import Tensor


def simple_inputs(q_BHTD: Tensor, k_BHSD: Tensor, causal: bool, documents_BS: Tensor | None) -> str:
    """Object to whatever torch's own kernels do not take: documents, shared heads, uneven ends."""
    if documents_BS is not None:
        return "takes no document boundaries"
    if q_BHTD.shape[1] != k_BHSD.shape[1]:
        return "needs as many key heads as query heads"
    if causal and q_BHTD.shape[-2] != k_BHSD.shape[-2]:
        return "needs as many queries as keys when causal"
    return ""


def flash_inputs(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, causal: bool, documents_BS: Tensor | None
) -> str:
    """Object to whatever the tiled algorithm of this package does not take."""
    if q_BHTD.shape[0] != k_BHSD.shape[0]:
        return "needs as many rows of keys as of queries"
    if not q_BHTD.dtype == k_BHSD.dtype == v_BHSD.dtype:
        return f"needs one dtype, not {q_BHTD.dtype}, {k_BHSD.dtype} and {v_BHSD.dtype}"
    if k_BHSD.shape != v_BHSD.shape or q_BHTD.shape[-1] != k_BHSD.shape[-1]:
        return "needs keys and values of one shape, as wide as the queries"
    if k_BHSD.shape[1] == 0 or q_BHTD.shape[1] % k_BHSD.shape[1]:
        return "needs a number of query heads that is a multiple of the key heads"
    if k_BHSD.shape[-2] == 0:
        return "needs at least one key"
    if (causal or documents_BS is not None) and q_BHTD.shape[-2] > k_BHSD.shape[-2]:
        return "needs at least as many keys as queries when causal or with documents"
    return ""
