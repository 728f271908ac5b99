"""What an implementation of attention is given, and reasons to refuse that several share."""

# B batch, H heads, T queries, S keys, D head width
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionInputs(NamedTuple):
    """Queries, keys, values and what a query may see of them.

    Keys may have fewer heads than queries: neighbors share one. A causal query sees no later key;
    the last query stands at the last key. With documents, a sequence packs several of them, and a
    query sees only the keys of its own.
    """

    q_BHTD: Tensor
    k_BHSD: Tensor
    v_BHSD: Tensor
    causal: bool
    documents_BS: Tensor | None = None  # an id per key: a document is a run of equal ids


def document_of(documents_BS: Tensor) -> Tensor:
    """Return (B, S): the running number of the document that each position belongs to.

    Runs of equal ids are counted, so ids may come in any order and no order has to be checked.
    """
    is_new_BS = documents_BS[:, 1:] != documents_BS[:, :-1]
    return torch.nn.functional.pad(is_new_BS.cumsum(1), (1, 0))


def document_bounds(documents_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, S) int32 each: the first position of a position's document, and one past its last.

    Neither ever decreases along a sequence. No value is read on the host.
    """
    S = documents_BS.shape[1]
    position_S = torch.arange(S, dtype=torch.int32, device=documents_BS.device)
    is_new_BS = torch.nn.functional.pad(
        documents_BS[:, 1:] != documents_BS[:, :-1], (1, 1), value=1
    )
    first_BS = torch.where(is_new_BS[:, :-1], position_S, 0).cummax(1).values
    past_BS = torch.where(is_new_BS[:, 1:], position_S + 1, S).flip(1).cummin(1).values.flip(1)
    return first_BS, past_BS.contiguous()


def refuse_for_torch(inputs: AttentionInputs) -> str:
    """Refuse what torch's own kernels do not take: documents, shared heads, uneven lengths."""
    q_BHTD, k_BHSD, _, causal, documents_BS = inputs
    if documents_BS is not None:
        return "takes no document boundaries"
    if q_BHTD.shape[1] != k_BHSD.shape[1]:
        return "needs as many key heads as query heads"
    if causal and q_BHTD.shape[-2] != k_BHSD.shape[-2]:
        return "needs as many queries as keys when causal"
    return ""


def refuse_for_flash(inputs: AttentionInputs) -> str:
    """Refuse what the tiled algorithm of this package does not take."""
    q_BHTD, k_BHSD, v_BHSD, causal, documents_BS = inputs
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
