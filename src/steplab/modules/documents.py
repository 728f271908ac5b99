"""Documents packed into one row. A document is a run of equal ids, so ids need no order."""

# B batch, T places of a row
from __future__ import annotations

import torch
from torch import Tensor


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
