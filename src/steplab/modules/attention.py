"""The attention core, and the documents that may be packed into one row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steplab.kernels import attention as attention_op
from steplab.kernels.dispatch import AUTO

# B batch, T places of a row


def document_starts(documents_BT: Tensor) -> Tensor:
    """Return (B, T) int64: the place where each place's document begins.

    Two places are of one document when these are equal. No value is read on the host.
    """
    place_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    is_new_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
    start_BT = torch.nn.functional.pad(torch.where(is_new_BT, place_T[1:], 0), (1, 0))
    return start_BT.cummax(1).values


def document_positions(documents_BT: Tensor) -> Tensor:
    """Return (B, T) int64: each place counted from where its document begins."""
    place_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    return place_T - document_starts(documents_BT)


# B batch, H heads, T queries, S keys, D head width


class Attention(nn.Module):
    """Scaled dot-product attention with a choice of implementation; it has no parameters."""

    op = "attention"

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.impl = AUTO
        self.ran = ""

    def forward(
        self, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Return (B, H, T, D). The queries stand at the last T of the S keys.

        With `documents_BS`, a query sees the keys of its own document only.
        """
        inputs = (q_BHTD, k_BHSD, v_BHSD, self.causal, documents_BS)
        self.ran = attention_op.choose(self.impl, *inputs)
        return attention_op.attention(self.ran, *inputs)
