"""Attention by the implementation that was asked for, and documents packed into one row.

A document is a run of equal ids, so ids need no order.
"""

# B batch, H heads, T queries or positions of a row, S keys, D head width
from __future__ import annotations

import torch
from torch import Tensor, nn

from steplab.kernels import attention as attention_op
from steplab.kernels.dispatch import AUTO


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

        With `documents_BS`, a query sees only the keys of its own document.
        """
        inputs = (q_BHTD, k_BHSD, v_BHSD, self.causal, documents_BS)
        self.ran = attention_op.choose(self.impl, *inputs)
        return attention_op.attention(self.ran, *inputs)


def document_starts(documents_BT: Tensor) -> Tensor:
    """Return (B, T) int64: the position where each position's document begins.

    Two positions belong to one document if these are equal. No value is read on the host.
    """
    position_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    is_new_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
    start_BT = torch.nn.functional.pad(torch.where(is_new_BT, position_T[1:], 0), (1, 0))
    return start_BT.cummax(1).values


def document_positions(documents_BT: Tensor) -> Tensor:
    """Return (B, T) int64: each position counted from where its document begins."""
    position_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    return position_T - document_starts(documents_BT)
